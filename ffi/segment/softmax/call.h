// Calls of segment_softmax and its gradient.
#pragma once

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct SoftmaxCall : SegmentCall {
  bool is_backward = false;
  const void* inputs[2] = {nullptr, nullptr};  // logits; or probabilities and their cotangents
  bool is_shared[2] = {false, false};
  void* output = nullptr;

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
