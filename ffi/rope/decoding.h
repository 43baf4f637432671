// Checks of buffers and attributes that rotate, for the handlers of rope and rope_write.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ffi/core/batch.h"
#include "ffi/core/handler.h"
#include "ffi/core/operands.h"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

// Sets the rotated features of a problem whose `features` are known. `attributes` has those of rope.
template <typename OpAttributes>
ffi::Error DecodeRotated(const char* op, const OpAttributes& attributes, Problem* problem) {
  const int64_t rotary_dim = attributes.rotary_dim, rotary_offset = attributes.rotary_offset;
  const int64_t features = problem->features;
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > features) {
    return InvalidArgument(op, "rotary_dim is " + std::to_string(rotary_dim) +
                                   ", expected an even number from 2 to the number of features, which is " +
                                   std::to_string(features));
  }
  if (rotary_offset < 0 || rotary_offset > features - rotary_dim) {
    return InvalidArgument(op, "rotary_offset is " + std::to_string(rotary_offset) + ", expected a number from 0 to " +
                                   std::to_string(features - rotary_dim));
  }
  problem->pairs = rotary_dim / 2;
  problem->first_rotated = rotary_offset;
  problem->interleaved = attributes.interleaved;
  return ffi::Error::Success();
}

// The sections of `pairs` pairs. `sizes`: of each section; empty: one section with all pairs.
inline ffi::Error DecodeSections(const char* op, ffi::Span<const int64_t> sizes, bool are_interleaved, int64_t pairs,
                                 Sections* sections) {
  *sections = Sections{1, are_interleaved, {}};
  if (sizes.size() == 0) return ffi::Error::Success();
  const auto wrong = [&] {
    return InvalidArgument(op, "sections expected: at most " + std::to_string(kMaxSections) +
                                   " numbers of at least 0 that sum to " + std::to_string(pairs));
  };
  if (sizes.size() > kMaxSections) return wrong();
  const int64_t count = static_cast<int64_t>(sizes.size());
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = sizes.begin()[i];
    if (size < 0 || size > pairs - end) return wrong();
    end += size;
    const int64_t last = are_interleaved ? count * size : end;
    sections->ends[i] = static_cast<int32_t>(std::min<int64_t>(last, std::numeric_limits<int32_t>::max()));
  }
  if (end != pairs) return wrong();
  sections->count = static_cast<int32_t>(count);
  return ffi::Error::Success();
}

// `type`: of the tensors.
inline ffi::Error DecodeFrequencies(const Batch& batch, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t pairs,
                                    BatchOperand* frequencies) {
  return batch.Take("frequencies", buffer, ComputeDataType(type), {2, pairs}, frequencies);
}

// [sections, places...], or [places...] without the attribute `sections`. Sets all but are_shared_by_examples.
inline ffi::Error DecodePositions(const char* op, const Batch& batch, const ffi::AnyBuffer& buffer, bool has_sections,
                                  std::vector<Dimension> places, Positions* positions) {
  const ffi::DataType type = buffer.element_type();
  JB_RETURN_IF_ERROR(CheckType(
      op, "positions", buffer, [] { return "S32 or S64"; }, type == ffi::DataType::S32 || type == ffi::DataType::S64));
  if (has_sections) places.insert(places.begin(), positions->sections.count);
  BatchOperand operand;
  JB_RETURN_IF_ERROR(batch.Take("positions", buffer, type, places, &operand));
  positions->data = operand.data;
  positions->are_64_bit = type == ffi::DataType::S64;
  positions->are_shared_by_batch = operand.is_shared;
  return ffi::Error::Success();
}

}  // namespace jax_baracuda::rope
