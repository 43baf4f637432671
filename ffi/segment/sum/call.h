// Calls of segment_sum, segment_mean and segment_sum_of_exponentials.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// What exponentials are raised to where they are summed: next to nothing beside others, and a sum of 0 is one of no rows.
template <typename C>
inline constexpr C kMinExponential = static_cast<C>(sizeof(C) == 4 ? 0x1p-120 : 0x1p-1000);

struct SumCall : SegmentCall {
  bool is_mean = false;
  bool is_of_exponentials = false;  // of exp(x) instead of x, for float and double
  const void* data = nullptr;
  void* output = nullptr;
  int32_t* count = nullptr;  // of a mean: [batch, segments]
};

}  // namespace jax_baracuda::segment
