// Calls of segment_order.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct OrderCall : SegmentCall {  // without data: problem.features is 1
  int32_t* order = nullptr;       // [batch, rows]
  int32_t* sorted_ids = nullptr;  // [batch, rows]; the number of segments for a row that is dropped

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
