// The windows of write_slice, for both back ends: the position of a window in its array, and its bytes.
//
// An array is reduced to as few axes as possible: an axis that is written whole is merged into the next outer axis. The
// last remaining axis is the run, which is contiguous in the array and in the window. The other axes number the rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/core/alignment.h"
#include "ffi/core/element_type.h"

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
  int64_t stride = 1;  // of the array, in units: see Update
  int64_t num_shards = 1;
  const int32_t* shard = nullptr;  // the number of this shard; nullptr if there is only one
  Start start;

  JB_HOST_DEVICE bool is_whole() const { return start.data == nullptr; }

  // The index in the array at which a window with this start begins. It may be outside the array if `drop` is set or
  // the axis is split.
  JB_HOST_DEVICE int64_t BeginOf(int64_t start_index, bool drop) const {
    if (is_whole()) return 0;
    const int64_t extent = num_shards * dim;
    int64_t begin = start_index;
    if (drop) {
      begin = Clamp(begin, -size, extent);  // beyond these limits nothing is inside; avoids overflow
    } else {
      if (begin < 0) begin += extent;
      begin = Clamp(begin, 0, extent - size);
    }
    return shard == nullptr ? begin : begin - Clamp(*shard, 0, num_shards - 1) * dim;
  }

  JB_HOST_DEVICE int64_t Begin(int64_t batch, bool drop) const {
    return is_whole() ? 0 : BeginOf(start.Load(batch), drop);
  }
};

// A window that is written or taken out. Units are bytes, or elements if rows begin or end inside bytes.
struct Update {
  void* dest = nullptr;
  void* source = nullptr;  // the window's content: the input of a write, or the output of a take
  int64_t source_bytes = 0;
  int64_t num_rows = 0;               // the product of all axes but the last
  int64_t source_rows = 0;            // num_rows, or the rows of one batch element if the batch shares the source
  int64_t rows_of_batch_element = 0;  // if the first axis is the batch
  int64_t run_units = 0;              // units per row
  int32_t num_axes = 0;
  int32_t bit_width = 8;  // bits per element
  int32_t word = 1;       // 1, 2, 4, 8 or 16 bytes: all rows begin and end at multiples of it, in both arrays
  bool has_bits = false;  // whether units are elements; `word` is then meaningless
  bool drop = false;
  bool has_batch = false;       // whether the first axis is a batch whose elements have separate starts
  bool may_be_outside = false;  // whether part of the window may be outside the array
  Axis axes[kMaxAxes];

  JB_HOST_DEVICE const Axis& run() const { return axes[num_axes - 1]; }
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

// The start of a row in the window's content, in units.
JB_HOST_DEVICE int64_t SourceRow(const Update& update, int64_t number) {
  const int64_t row = update.source_rows == update.num_rows ? number : Divide(number, update.source_rows).remainder;
  return row * update.run_units;
}

// The position of a row in the array, in units.
struct Row {
  int64_t begin;        // the start of the row, even if it is outside the array
  int64_t first, last;  // the range of the row's units that is inside the array
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

// The element of the window's content for an element of the array; -1 if the element is not in the window.
JB_HOST_DEVICE int64_t SourceOf(const Update& update, int64_t element) {
  int64_t batch = 0, row = 0;
  for (int i = 0; i < update.num_axes; ++i) {
    const Axis& axis = update.axes[i];
    const QuotientAndRemainder divided = Divide(element, axis.stride);
    if (i == 0 && update.has_batch) batch = divided.quotient;
    const int64_t index = divided.quotient - axis.Begin(batch, update.drop);
    if (index < 0 || index >= axis.size) return -1;
    element = divided.remainder;
    if (i + 1 == update.num_axes) return SourceRow(update, row) + index * axis.stride + element;
    row = row * axis.size + index;
  }
  return -1;
}

// If units are elements: the maximum number of bytes that a row can touch.
JB_HOST_DEVICE int64_t MaxBytesOfRow(const Update& update) { return (update.run_units * update.bit_width + 14) / 8; }

// If units are elements: writes byte number `byte` of the bytes that a row touches, unless an earlier row touches it
// too. So each byte is written once, by the first row in it, with the elements of all rows.
JB_HOST_DEVICE void WriteByteOnce(const Update& update, int64_t row_number, const Row& row, int64_t byte) {
  const int width = update.bit_width, shift = width == 4 ? 1 : 2;  // 2 or 4 elements in a byte
  const int64_t begin = row.begin + row.first, end = row.begin + row.last;
  if (begin >= end) return;
  const int64_t index = (begin >> shift) + byte, first = index << shift;
  if (first >= end) return;
  const int64_t num_elements = update.axes[0].dim * update.axes[0].stride;
  const uint8_t* const sources = static_cast<const uint8_t*>(update.source);
  const uint32_t mask = (1u << width) - 1;
  uint32_t is_written = 0, written = 0;
  for (int i = 0; i < 1 << shift; ++i) {
    const int64_t element = first + i;
    int64_t source = -1;
    if (begin <= element && element < end) {
      source = SourceRow(update, row_number) + element - row.begin;
    } else if (element < num_elements) {
      source = SourceOf(update, element);
    }
    if (source < 0) continue;
    if (element < begin) return;
    const int64_t source_byte = source >> shift;
    const int source_bit = static_cast<int>(source - (source_byte << shift)) * width;
    is_written |= mask << (i * width);
    written |= (sources[source_byte] >> source_bit & mask) << (i * width);
  }
  uint8_t* const dest = static_cast<uint8_t*>(update.dest) + index;
  *dest = static_cast<uint8_t>(is_written == 0xff ? written : (*dest & ~is_written) | written);
}

// The axes of an array, outermost first. The first axis is the batch, of size 1 without a batch. Strides are in
// elements.
struct Axes {
  int count = 0;
  Axis at[kMaxAxes];
};

// Reduces the axes. If the batch shares the source, the window's content is that of one batch element.
inline void ReduceAxes(const Axes& axes, bool source_is_shared, Update* update) {
  for (int i = 0; i < axes.count; ++i) {
    const Axis& axis = axes.at[i];
    update->has_batch = update->has_batch || !axis.start.is_shared;
    update->may_be_outside = update->may_be_outside || (!axis.is_whole() && (update->drop || axis.num_shards > 1));
  }
  const bool keeps_batch = update->has_batch || source_is_shared;
  int first = axes.count;  // the first remaining axis; `reduced` is filled from its end
  Axis reduced[kMaxAxes];
  for (int i = axes.count - 1; i >= 0; --i) {
    const Axis& axis = axes.at[i];
    if (first == axes.count || !reduced[first].is_whole() || (i == 0 && keeps_batch)) {
      reduced[--first] = axis;
    } else if (axis.is_whole()) {
      reduced[first].size *= axis.size;
      reduced[first].dim *= axis.dim;
    } else if (first == axes.count - 1) {
      reduced[first] = axis;  // a longer run
    } else {
      reduced[--first] = axis;
    }
  }
  update->num_axes = axes.count - first;
  update->num_rows = 1;
  for (int i = 0; i < update->num_axes; ++i) {
    update->axes[i] = reduced[first + i];
    if (i + 1 < update->num_axes) update->num_rows *= update->axes[i].size;
  }
  update->rows_of_batch_element = update->num_rows / axes.at[0].size;
  update->source_rows = source_is_shared ? update->rows_of_batch_element : update->num_rows;
  update->run_units = update->run().size * update->run().stride;
}

// Converts units from elements to bytes, unless rows begin or end inside bytes.
inline void ChooseUnits(Update* update) {
  const int64_t width = update->bit_width;
  Axis& run = update->axes[update->num_axes - 1];
  int64_t bits = update->run_units * width;  // its lowest set bit: the largest power of two that divides all sizes
  if (!run.is_whole()) bits |= run.stride * width;
  for (int i = 0; i + 1 < update->num_axes; ++i) bits |= update->axes[i].stride * width;
  update->has_bits = bits % 8 != 0;
  if (update->has_bits) return;
  for (int i = 0; i < update->num_axes; ++i) update->axes[i].stride = update->axes[i].stride * width / 8;
  update->run_units = update->run_units * width / 8;
  if (run.is_whole()) run.size = run.dim = update->run_units;
  if (run.is_whole()) run.stride = 1;
  const uint64_t alignment = static_cast<uint64_t>(bits / 8) | reinterpret_cast<uintptr_t>(update->dest) |
                             reinterpret_cast<uintptr_t>(update->source) | kVectorBytes;
  update->word = static_cast<int32_t>(alignment & (~alignment + 1));
}

// How the windows of a call are moved.
enum class Strategy {
  kNothing,
  kBytes,  // rows consist of whole bytes
  kBits,   // the rows of some window begin or end inside bytes
};

inline constexpr const char* kStrategyNames[] = {"nothing", "bytes", "bits"};
inline constexpr int kTakeStrategies = 2;  // the first two: the gradient has no elements narrower than a byte

inline Strategy ChooseStrategy(const std::vector<Update>& updates) {
  Strategy strategy = Strategy::kNothing;
  for (const Update& update : updates) {
    strategy = std::max(strategy, update.has_bits ? Strategy::kBits : Strategy::kBytes);
  }
  return strategy;
}

}  // namespace jax_baracuda::write_slice
