// Calls of gather_segment_max, gather_segment_min and their gradients.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// Gather ids out of range name the nearest row. Winners are the numbers of edges, as `edge_order` tells them.
struct GatherExtremumCall : GatheringCall {
  bool is_minimum = false;
  bool with_winner = false;
  bool first_wins = false;
  void* output = nullptr;     // [batch, segments, features]
  int32_t* winner = nullptr;  // likewise, with_winner
};

// The edges of the gradient go from cells to the rows of d_data: what is gathered are the cotangents of winners, and
// `problem.segments` counts the rows. The CPU kernels find which edges won which cells first, over the edges of the
// forward pass.
struct GatherExtremumBackwardCall : GatheringCall {
  const int32_t* winner = nullptr;  // [batch or 1, cells of num_rows segments]
  bool winner_is_shared = false;
  const int32_t* segment_ids_of_edges = nullptr;  // [batch or 1, edges]
  bool segment_ids_of_edges_are_shared = false;
  const int32_t* gather_ids_of_edges = nullptr;  // [batch or 1, edges]
  bool gather_ids_of_edges_are_shared = false;
  const int32_t* forward_order = nullptr;  // [batch or 1, edges], their numbers; or nullptr
  bool forward_order_is_shared = false;
  const void* gathered = nullptr;  // the data of the forward pass, or nullptr unless ties are shared
  bool gathered_is_shared = false;
  const void* extrema = nullptr;  // its output, likewise, as shared as `winner`
  bool shares_ties = false;
  void* d_data = nullptr;  // [batch, problem.segments, features]
};

}  // namespace jax_baracuda::segment
