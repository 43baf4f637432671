// The CPU kernels of write_slice and its gradient.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/core/cpu_kernel.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/target_table.h"
#include "ffi/write_slice/write_slice_handler.h"

namespace jax_baracuda::write_slice {
namespace {

void CopyArrays(ffi::ThreadPool& pool, const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    ForEachRange(pool, copy.bytes, 2 * copy.bytes, [&](int64_t begin, int64_t end) {
      std::memcpy(static_cast<char*>(copy.to) + begin, static_cast<const char*>(copy.from) + begin,
                  static_cast<size_t>(end - begin));
    });
  }
}

// Calls body(row number, begin, end) for byte ranges of rows that cover the window. Each row has `row_bytes` bytes.
template <typename Body>
void ForEachRangeOfRow(ffi::ThreadPool& pool, const Update& update, int64_t row_bytes, const Body& body) {
  const int64_t bytes = update.num_rows * row_bytes;
  ForEachRange(pool, bytes, 2 * bytes, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / row_bytes, row_begin = row * row_bytes;
      const int64_t range_end = std::min(end, row_begin + row_bytes);
      body(row, begin - row_begin, range_end - row_begin);
      begin = range_end;
    }
  });
}

// Calls body(dest, source, bytes) for all ranges of the window that are inside the array.
template <typename Body>
void ForEachRangeInside(ffi::ThreadPool& pool, const Update& update, const Body& body) {
  ForEachRangeOfRow(pool, update, update.run_units, [&](int64_t number, int64_t begin, int64_t end) {
    const Row row = LocateRow(update, number);
    begin = std::max(begin, row.first);
    end = std::min(end, row.last);
    if (begin >= end) return;
    body(static_cast<char*>(update.dest) + row.begin + begin,
         static_cast<char*>(update.source) + SourceRow(update, number) + begin, static_cast<size_t>(end - begin));
  });
}

// Copies elements that fill `bytes` bytes. They begin at bit `bit` of the first source byte.
void CopyBits(const uint8_t* source, int bit, int64_t bytes, uint8_t* dest) {
  if (bit == 0) {
    std::memcpy(dest, source, static_cast<size_t>(bytes));
    return;
  }
  JB_VECTORIZE
  for (int64_t i = 0; i < bytes; ++i) dest[i] = static_cast<uint8_t>(source[i] >> bit | source[i + 1] << (8 - bit));
}

// Writes a row's bytes [begin, end). Only the row's first and last byte may also have elements of other rows.
void WriteBytesOfRow(const Update& update, int64_t number, int64_t begin, int64_t end) {
  const Row row = LocateRow(update, number);
  const int64_t first = row.begin + row.first, last = row.begin + row.last;
  if (first >= last) return;
  const int64_t per_byte = 8 / update.bit_width, first_byte = first / per_byte;
  // The bytes between them belong to this row alone.
  const int64_t whole_begin = std::clamp(int64_t{1}, begin, end);
  const int64_t whole_end = std::clamp(last / per_byte - first_byte, whole_begin, end);
  for (int64_t byte = begin; byte < whole_begin; ++byte) WriteByteOnce(update, number, row, byte);
  if (whole_begin < whole_end) {
    const int64_t source = SourceRow(update, number) + (first_byte + whole_begin) * per_byte - row.begin;
    CopyBits(static_cast<const uint8_t*>(update.source) + source / per_byte,
             static_cast<int>(source % per_byte) * update.bit_width, whole_end - whole_begin,
             static_cast<uint8_t*>(update.dest) + first_byte + whole_begin);
  }
  for (int64_t byte = whole_end; byte < end; ++byte) WriteByteOnce(update, number, row, byte);
}

void Write(ffi::ThreadPool& pool, const Update& update) {
  if (update.has_bits) {
    ForEachRangeOfRow(pool, update, MaxBytesOfRow(update),
                      [&](int64_t number, int64_t begin, int64_t end) { WriteBytesOfRow(update, number, begin, end); });
    return;
  }
  ForEachRangeInside(pool, update,
                     [](char* dest, const char* source, size_t bytes) { std::memcpy(dest, source, bytes); });
}

void Take(ffi::ThreadPool& pool, const Update& update) {
  if (update.may_be_outside) {
    WriteZeroBytes(pool, update.source, update.source_bytes);
  }
  ForEachRangeInside(pool, update, [](char* dest, char* source, size_t bytes) {
    std::memcpy(source, dest, bytes);
    WriteZeros(dest, static_cast<int64_t>(bytes));
  });
}

ffi::Error WriteHandler(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results,
                        ffi::Span<const int64_t> windows, bool drop, int64_t num_batch_dims) {
  Call call;
  JB_RETURN_IF_ERROR(Decoder("write_slice", operands, results, windows, drop, num_batch_dims).DecodeWrite(&call));
  CopyArrays(pool, call.copies);
  for (const Update& update : call.updates) Write(pool, update);
  return ffi::Error::Success();
}

ffi::Error TakeHandler(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results,
                       ffi::Span<const int64_t> windows, bool drop, int64_t num_batch_dims) {
  Call call;
  JB_RETURN_IF_ERROR(
      Decoder("write_slice_backward", operands, results, windows, drop, num_batch_dims).DecodeTake(&call));
  CopyArrays(pool, call.copies);
  for (const Update& update : call.updates) Take(pool, update);
  return ffi::Error::Success();
}

JB_CPU_TARGET("write_slice", WriteHandler, BindWindows<ffi::ThreadPool>(), PlanWindows, JB_NAMES(kStrategyNames));
JB_CPU_TARGET("write_slice_backward", TakeHandler, BindWindows<ffi::ThreadPool>(), PlanWindows, kStrategyNames,
              kStrategyNames + kTakeStrategies);

}  // namespace
}  // namespace jax_baracuda::write_slice
