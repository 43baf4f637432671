// Calls of segment_max, segment_min, segment_argmax, segment_argmin and their gradients.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct ExtremumCall : SegmentCall {
  bool is_minimum = false;
  bool with_winner = false;
  bool first_wins = false;
  const void* data = nullptr;
  void* output = nullptr;
  int32_t* winner = nullptr;  // with_winner: [batch, segments, features]

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

struct ExtremumBackwardCall : SegmentCall {
  BatchOperand d_output;
  BatchOperand winner;  // int32
  BatchOperand data;    // if ties are shared
  BatchOperand output;  // likewise
  void* d_data = nullptr;

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

// The first row that attains each cell's maximum; the number of rows for an empty segment.
struct ArgCall : SegmentCall {
  bool is_minimum = false;
  const void* data = nullptr;
  int32_t* row = nullptr;

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
