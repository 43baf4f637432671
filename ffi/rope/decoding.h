// Checks of buffers and attributes that rotate, for the handlers of rope and rope_write.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ffi/core/arguments.h"
#include "ffi/core/batch.h"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

// Sets the rotated features of a problem whose `features` are known.
inline void DecodeRotated(Arguments& arguments, Problem* problem) {
  const int64_t rotary_dim = arguments.Integer("rotary_dim"), rotary_offset = arguments.Integer("rotary_offset");
  const int64_t features = problem->features;
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > features) {
    throw InvalidArgument("rotary_dim is " + std::to_string(rotary_dim) +
                          ", expected an even number from 2 to the number of features, which is " +
                          std::to_string(features));
  }
  if (rotary_offset < 0 || rotary_offset > features - rotary_dim) {
    throw InvalidArgument("rotary_offset is " + std::to_string(rotary_offset) + ", expected a number from 0 to " +
                          std::to_string(features - rotary_dim));
  }
  problem->pairs = rotary_dim / 2;
  problem->first_rotated = rotary_offset;
  problem->interleaved = arguments.Flag("interleaved");
}

// The sections of `pairs` pairs. `sizes`: of each section; empty: one section with all pairs.
inline Sections DecodeSections(IntegerSpan sizes, bool are_interleaved, int64_t pairs) {
  Sections sections{1, are_interleaved, {}};
  if (sizes.size() == 0) return sections;
  const auto wrong = [&] {
    return InvalidArgument("sections are " + ShapeString(sizes) + ", expected at most " + std::to_string(kMaxSections) +
                           " numbers of at least 0 that sum to " + std::to_string(pairs));
  };
  if (sizes.size() > kMaxSections) throw wrong();
  const int64_t count = static_cast<int64_t>(sizes.size());
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = sizes[i];
    if (size < 0 || size > pairs - end) throw wrong();
    end += size;
    const int64_t last = are_interleaved ? count * size : end;
    sections.ends[i] = static_cast<int32_t>(std::min<int64_t>(last, std::numeric_limits<int32_t>::max()));
  }
  if (end != pairs) throw wrong();
  sections.count = static_cast<int32_t>(count);
  return sections;
}

// `type`: of the tensors.
inline BatchOperand DecodeFrequencies(const Batch& batch, const Buffer& buffer, DataType type, int64_t pairs) {
  return batch.Take(buffer, ComputeDataType(type), {2, pairs});
}

// [sections, places...], or [places...] without the attribute `sections`. Sets all but are_shared_by_examples.
inline void DecodePositions(const Batch& batch, const Buffer& buffer, bool has_sections, std::vector<Dimension> places,
                            Positions* positions) {
  if (buffer.type != XLA_FFI_DataType_S32 && buffer.type != XLA_FFI_DataType_S64) {
    throw buffer.WrongType("S32 or S64");
  }
  if (has_sections) places.insert(places.begin(), positions->sections.count);
  const BatchOperand operand = batch.Take(buffer, buffer.type, places);
  positions->data = operand.data;
  positions->are_64_bit = buffer.type == XLA_FFI_DataType_S64;
  positions->are_shared_by_batch = operand.is_shared;
}

}  // namespace jax_baracuda::rope
