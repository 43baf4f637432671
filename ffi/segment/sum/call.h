// Calls of segment_sum, segment_mean and segment_sum_of_exponentials.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// The minimum of summed exponentials. It is negligible beside other terms, but makes a sum of 0 mean that there are no
// rows.
template <typename C>
inline constexpr C kMinExponential = static_cast<C>(sizeof(C) == 4 ? 0x1p-120 : 0x1p-1000);

struct SumCall : SegmentCall {
  bool is_mean = false;
  bool is_of_exponentials = false;  // sums exp(x) instead of x, for float and double
  const void* data = nullptr;
  void* output = nullptr;
  int32_t* count = nullptr;  // with is_mean: [batch, segments]

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
