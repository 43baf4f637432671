// The windows of write_slice, for both back ends: the position of a window in its array, and its bytes.
//
// An array is reduced to as few axes as possible: an axis that is written whole is merged into the next outer axis. The
// last remaining axis is the run, which is contiguous in the array and in the window. The other axes number the rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#ifdef __CUDACC__
#include <cuda/atomic>
#endif

#include "ffi/core/alignment.h"
#include "ffi/core/copy.h"
#include "ffi/core/element_type.h"
#include "ffi/core/executor.h"

namespace jax_baracuda::write_slice {

inline constexpr int kMaxAxes = 9;  // eight plus the batch

// The start of a window along an axis, for each batch element.
struct Start {
  const void* data = nullptr;  // nullptr: the window is the whole axis
  ElementType type = ElementType::kInt32;
  bool is_shared = true;  // one start for the whole batch

  // A uint64 above the maximum of int64 becomes that maximum.
  JB_HOST_DEVICE int64_t Load(int64_t batch) const {
    const int64_t i = is_shared ? 0 : batch;
    // int32 is by far the most frequent type. Checking it first avoids the switch, a jump table in GPU memory.
    if (type == ElementType::kInt32) return static_cast<const int32_t*>(data)[i];
    switch (type) {
      case ElementType::kInt8:
        return static_cast<const int8_t*>(data)[i];
      case ElementType::kInt16:
        return static_cast<const int16_t*>(data)[i];
      case ElementType::kUInt8:
        return static_cast<const uint8_t*>(data)[i];
      case ElementType::kUInt16:
        return static_cast<const uint16_t*>(data)[i];
      case ElementType::kUInt32:
        return static_cast<const uint32_t*>(data)[i];
      case ElementType::kUInt64: {
        const uint64_t start = static_cast<const uint64_t*>(data)[i];
        return start > static_cast<uint64_t>(INT64_MAX) ? INT64_MAX : static_cast<int64_t>(start);
      }
      default:
        return static_cast<const int64_t*>(data)[i];
    }
  }
};

// Whether starts may have this type.
inline bool IsStartType(ElementType type) { return ElementType::kInt8 <= type && type <= ElementType::kUInt64; }

JB_HOST_DEVICE int64_t Clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// One axis of an array. The array may be a shard of a larger array that is split along this axis over devices.
struct Axis {
  int64_t size = 1;    // of the window
  int64_t dim = 1;     // of the array
  int64_t stride = 0;  // of the array, in bits
  int64_t num_shards = 1;
  const int32_t* shard = nullptr;  // the number of this shard; nullptr if there is only one
  Start start;

  JB_HOST_DEVICE bool is_whole() const { return start.data == nullptr; }

  // The index in the array at which the window begins. It may be outside the array if `drop` is set or the axis is
  // split.
  JB_HOST_DEVICE int64_t Begin(int64_t batch, bool drop) const {
    if (is_whole()) return 0;
    const int64_t extent = num_shards * dim;
    int64_t begin = start.Load(batch);
    if (drop) {
      begin = Clamp(begin, -size, extent);  // beyond these limits nothing is inside; avoids overflow
    } else {
      if (begin < 0) begin += extent;
      begin = Clamp(begin, 0, extent - size);
    }
    return shard == nullptr ? begin : begin - Clamp(*shard, 0, num_shards - 1) * dim;
  }
};

// A window that is written or taken out. Positions are in bits, because rows of narrow elements may begin and end
// inside bytes.
struct Update {
  void* dest = nullptr;
  void* source = nullptr;             // the window's content: the input of a write, or the output of a take
  int64_t num_rows = 1;               // the product of all axes but the last
  int64_t source_rows = 1;            // num_rows, or the rows of one batch element if the batch shares the source
  int64_t rows_of_batch_element = 1;  // if the first axis is the batch
  int64_t row_bits = 0;
  int32_t word = 1;  // 1, 2, 4, 8 or 16 bytes: all rows begin and end at multiples of it, in both arrays; 0: bits
  int32_t num_axes = 0;
  bool drop = false;
  bool has_batch = false;       // whether the first axis is a batch whose elements have separate starts
  bool may_be_outside = false;  // whether part of the window may be outside the array
  Axis axes[kMaxAxes];  // outermost first; before MergeAxes, the first one is the batch, of size 1 without a batch

  JB_HOST_DEVICE const Axis& run() const { return axes[num_axes - 1]; }

  // The maximum number of bytes that a row can touch.
  JB_HOST_DEVICE int64_t MaxBytesOfRow() const { return word == 0 ? (row_bits + 14) / 8 : row_bits / 8; }
};

struct Call {
  std::vector<Copy> copies;
  std::vector<Update> updates;

  // Writes the windows' contents into their arrays.
  RunStatus Write(Executor executor) const;

  // Moves the windows' contents out of their arrays and leaves zeros there. Content outside an array is zero. Not
  // supported if rows begin or end inside bytes.
  RunStatus Take(Executor executor) const;
};

struct QuotientAndRemainder {
  int64_t quotient, remainder;
};

// For non-negative numbers. GPUs divide 32-bit numbers several times faster.
JB_HOST_DEVICE QuotientAndRemainder Divide(int64_t number, int64_t divisor) {
  if (((number | divisor) >> 32) == 0) {
    const uint32_t n = static_cast<uint32_t>(number), d = static_cast<uint32_t>(divisor);
    return {n / d, n % d};
  }
  return {number / divisor, number % divisor};
}

// The start of a row in the window's content, in bits.
JB_HOST_DEVICE int64_t SourceRow(const Update& update, int64_t number) {
  const int64_t row = update.source_rows == update.num_rows ? number : Divide(number, update.source_rows).remainder;
  return row * update.row_bits;
}

// The position of a row in the array, in bits.
struct Row {
  int64_t begin;        // the start of the row, even if it is outside the array
  int64_t first, last;  // the range of the row's bits that is inside the array
};

JB_HOST_DEVICE Row LocateRow(const Update& update, int64_t number) {
  const int64_t batch = update.has_batch ? Divide(number, update.rows_of_batch_element).quotient : 0;
  const Axis& run = update.run();
  const int64_t run_begin = run.Begin(batch, update.drop);
  Row row{run_begin * run.stride, Clamp(-run_begin, 0, run.size) * run.stride,
          Clamp(run.dim - run_begin, 0, run.size) * run.stride};
  for (int i = update.num_axes - 2; i >= 0; --i) {
    const Axis& axis = update.axes[i];
    int64_t index = number;
    if (i > 0) {
      const QuotientAndRemainder divided = Divide(number, axis.size);
      index = divided.remainder;
      number = divided.quotient;
    }
    index += axis.Begin(batch, update.drop);
    if (index < 0 || index >= axis.dim) row.last = row.first;
    row.begin += index * axis.stride;
  }
  return row;
}

// Writes the bits of `mask`. Other threads may write the byte's other bits at the same time.
JB_HOST_DEVICE void WriteBits(uint8_t* byte, uint8_t mask, uint8_t bits) {
  const uint8_t others = static_cast<uint8_t>(~mask);
#ifdef __CUDA_ARCH__
  const cuda::atomic_ref<uint8_t, cuda::thread_scope_device> shared(*byte);
  shared.fetch_and(others, cuda::memory_order_relaxed);
  shared.fetch_or(bits, cuda::memory_order_relaxed);
#else
  __atomic_fetch_and(byte, others, __ATOMIC_RELAXED);
  __atomic_fetch_or(byte, bits, __ATOMIC_RELAXED);
#endif
}

// Writes the part of a row that is in byte number `i` of the bytes that the row touches.
JB_HOST_DEVICE void WriteByteOfRow(const Update& update, int64_t row_number, const Row& row, int64_t i) {
  const int64_t row_begin = row.begin + row.first, row_end = row.begin + row.last;
  const int64_t byte = (row_begin >> 3) + i, begin = byte << 3, end = begin + 8;
  const int64_t first = begin < row_begin ? row_begin : begin, last = end < row_end ? end : row_end;
  if (first >= last) return;
  const int64_t source_bit = SourceRow(update, row_number) + first - row.begin;
  const uint8_t* const source = static_cast<const uint8_t*>(update.source) + (source_bit >> 3);
  const int count = static_cast<int>(last - first), skipped = static_cast<int>(source_bit & 7);
  uint32_t bits = source[0];
  if (skipped + count > 8) bits |= static_cast<uint32_t>(source[1]) << 8;
  bits >>= skipped;
  uint8_t* const dest = static_cast<uint8_t*>(update.dest) + byte;
  if (count == 8) {
    *dest = static_cast<uint8_t>(bits);
    return;
  }
  const int shift = static_cast<int>(first - begin);
  const uint32_t mask = ((1u << count) - 1) << shift;
  WriteBits(dest, static_cast<uint8_t>(mask), static_cast<uint8_t>(bits << shift & mask));
}

// Merges the axes of an update, which must have elements, and sets everything that follows from them. If the batch
// shares the source, the window's content is that of one batch element.
inline void MergeAxes(bool source_is_shared, Update* update) {
  Axis* const axes = update->axes;
  const int count = update->num_axes;
  const int64_t batch = axes[0].size;
  for (int i = 0; i < count; ++i) {
    update->has_batch = update->has_batch || !axes[i].start.is_shared;
    update->may_be_outside =
        update->may_be_outside || (!axes[i].is_whole() && (update->drop || axes[i].num_shards > 1));
  }
  const bool keeps_batch = update->has_batch || source_is_shared;
  int first = count - 1;  // the first merged axis
  for (int i = count - 2; i >= 0; --i) {
    const Axis axis = axes[i];
    Axis& inner = axes[first];
    const bool may_merge = inner.is_whole() && !(i == 0 && keeps_batch);
    if (may_merge && first == count - 1) {
      inner = axis;  // a longer run
    } else if (may_merge && axis.is_whole()) {
      inner.size *= axis.size;
      inner.dim *= axis.dim;
    } else {
      axes[--first] = axis;
    }
  }
  std::copy(axes + first, axes + count, axes);
  update->num_axes = count - first;

  const Axis& run = update->run();
  update->row_bits = run.size * run.stride;
  int64_t bits = update->row_bits;  // the lowest set bit divides all sizes
  if (!run.is_whole()) bits |= run.stride;
  for (int i = 0; i + 1 < update->num_axes; ++i) {
    update->num_rows *= axes[i].size;
    bits |= axes[i].stride;
  }
  update->rows_of_batch_element = update->num_rows / batch;
  update->source_rows = source_is_shared ? update->rows_of_batch_element : update->num_rows;
  if (bits % 8 != 0) {
    update->word = 0;
    return;
  }
  const uint64_t alignment = static_cast<uint64_t>(bits / 8) | reinterpret_cast<uintptr_t>(update->dest) |
                             reinterpret_cast<uintptr_t>(update->source) | kVectorBytes;
  update->word = static_cast<int32_t>(alignment & (~alignment + 1));
}

}  // namespace jax_baracuda::write_slice
