// The CPU kernels of write_slice and its gradient.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/core/cpu_kernel.h"
#include "ffi/core/parallel_for.h"
#include "ffi/write_slice/write_slice.h"

namespace jax_baracuda::write_slice {
namespace {

// Moves bytes [begin, end) of those that a row touches.
template <bool kTake>
void MoveBytesOfRow(const Update& update, int64_t number, int64_t begin, int64_t end) {
  const Row row = LocateRow(update, number);
  if (!kTake && update.word == 0) {
    for (int64_t i = begin; i < end; ++i) WriteByteOfRow(update, number, row, i);
    return;
  }
  begin = std::max(begin, row.first / 8);
  end = std::min(end, row.last / 8);
  if (begin >= end) return;
  const size_t bytes = static_cast<size_t>(end - begin);
  char* const dest = static_cast<char*>(update.dest) + row.begin / 8 + begin;
  char* const source = static_cast<char*>(update.source) + SourceRow(update, number) / 8 + begin;
  if constexpr (kTake) {
    std::memcpy(source, dest, bytes);
    std::memset(dest, 0, bytes);
  } else {
    std::memcpy(dest, source, bytes);
  }
}

template <bool kTake>
void Move(ffi::ThreadPool& pool, const Update& update) {
  const int64_t row_bytes = update.MaxBytesOfRow(), bytes = update.num_rows * row_bytes;
  ForEachRange(pool, bytes, 2 * bytes, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t number = begin / row_bytes, row_begin = number * row_bytes;
      const int64_t range_end = std::min(end, row_begin + row_bytes);
      MoveBytesOfRow<kTake>(update, number, begin - row_begin, range_end - row_begin);
      begin = range_end;
    }
  });
}

template <bool kTake>
void MoveAll(ffi::ThreadPool& pool, const Call& call) {
  for (const Copy& copy : call.copies) CopyArray(pool, copy);
  for (const Update& update : call.updates) {
    if (kTake && update.may_be_outside) {
      WriteZeroBytes(pool, update.source, update.source_rows * update.row_bits / 8);
    }
    Move<kTake>(pool, update);
  }
}

}  // namespace

bool Call::Write(ffi::ThreadPool& pool) const {
  MoveAll</*kTake=*/false>(pool, *this);
  return true;
}

bool Call::Take(ffi::ThreadPool& pool) const {
  MoveAll</*kTake=*/true>(pool, *this);
  return true;
}

}  // namespace jax_baracuda::write_slice
