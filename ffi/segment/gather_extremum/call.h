// Calls of gather_segment_max, gather_segment_min and their gradients.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// Gather ids out of range name the nearest row. Winners are edge numbers, taken from `edge_order` if there is one.
struct GatherExtremumCall : GatheringCall {
  bool is_minimum = false;
  bool with_winner = false;
  bool first_wins = false;
  void* output = nullptr;     // [batch, segments, features]
  int32_t* winner = nullptr;  // likewise, with_winner

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

// The gradient sums over transposed edges: each gathers the cotangents of a segment, and adds those of the cells that
// it won to a row of d_data. So `num_rows` counts segments, and `problem.segments` counts rows of d_data. The CPU
// kernels first find the cells that each edge won, over the edges of the forward pass.
struct GatherExtremumBackwardCall : GatheringCall {
  const int32_t* winner = nullptr;  // [batch or 1, num_rows, features]
  bool winner_is_shared = false;
  const int32_t* segment_ids_of_edges = nullptr;  // [batch or 1, edges]
  bool segment_ids_of_edges_are_shared = false;
  const int32_t* gather_ids_of_edges = nullptr;  // [batch or 1, edges]
  bool gather_ids_of_edges_are_shared = false;
  const int32_t* forward_order = nullptr;  // [batch or 1, edges], the edge numbers in the forward pass; or nullptr
  bool forward_order_is_shared = false;
  const void* gathered = nullptr;  // data of the forward pass; nullptr unless ties are shared
  bool gathered_is_shared = false;
  const void* extrema = nullptr;  // its output; nullptr unless ties are shared; shared by the batch if `winner` is
  bool shares_ties = false;
  void* d_data = nullptr;  // [batch, problem.segments, features]

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
