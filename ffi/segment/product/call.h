// Calls of segment_prod and its gradient.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct ProductCall : SegmentCall {
  const void* data = nullptr;
  void* output = nullptr;
  void* mantissa = nullptr;   // with `packed`, the residual for the gradient (see arithmetic.h); or nullptr
  int32_t* packed = nullptr;  // see `mantissa`

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

struct ProductBackwardCall : SegmentCall {
  const void* d_output = nullptr;
  const void* mantissa = nullptr;
  const int32_t* packed = nullptr;
  const void* data = nullptr;
  void* d_data = nullptr;
  bool d_output_is_shared = false;
  bool product_is_shared = false;  // mantissa and packed are shared

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
