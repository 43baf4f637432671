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
  int32_t* order = nullptr;   // with_winner: a permutation of each batch element's rows, grouped by segment
  int64_t order_size = 0;     // rows, or 1 if no order is wanted

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

struct ExtremumBackwardCall : SegmentCall {
  const void* d_output = nullptr;
  const int32_t* winner = nullptr;
  const int32_t* order = nullptr;  // order in which rows are visited, ideally grouped by segment; or nullptr
  bool has_order = false;
  bool shares_ties = false;
  const void* data = nullptr;    // nullptr unless ties are shared
  const void* output = nullptr;  // likewise
  void* d_data = nullptr;
  bool d_output_is_shared = false;
  bool winner_is_shared = false;  // output likewise
  bool order_is_shared = false;

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
