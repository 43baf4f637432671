// Calls of the gradients of segment_sum and segment_mean.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// Every row receives its segment's cells, divided by the count if there is one; dropped rows receive 0.
struct GatherCall : SegmentCall {  // problem.data_is_shared is unused
  const void* cells = nullptr;     // [batch or 1, segments, features]
  bool cells_are_shared = false;
  const int32_t* count = nullptr;  // [batch or 1, segments] to divide the cells by, or nullptr
  bool count_is_shared = false;
  void* rows = nullptr;  // [batch, rows, features]

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
