// Calls of segment_sum and segment_mean, and of those that accumulate in float64.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct SumArguments : SegmentCall {
  bool is_mean = false;
  const void* data = nullptr;
  void* output = nullptr;
  int32_t* count = nullptr;  // with is_mean: [batch, segments]

  // Means return counts even without features.
  bool HasCounts() const { return is_mean && problem.batch * problem.segments > 0; }
};

struct SumCall : SumArguments {
  static constexpr const char *kSumName = "segment_sum", *kMeanName = "segment_mean";

  bool HasKernel() const {
    return is_mean ? IsFloating(type) : DispatchWrapping(type, [](auto) {});
  }
  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
