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

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// The gradient sums over transposed edges: each gathers the cotangents of a segment, and adds those of the cells that
// it won to a row of d_data. So `num_rows` counts segments, and `problem.segments` counts rows of d_data. The CPU
// kernels first find the cells that each edge won, over the edges of the forward pass.
struct GatherExtremumBackwardCall : GatheringCall {
  BatchOperand winner;                // int32 [batch or 1, num_rows, features]
  BatchOperand segment_ids_of_edges;  // int32 [batch or 1, edges]
  BatchOperand gather_ids_of_edges;   // int32 [batch or 1, edges]
  BatchOperand forward_order;         // int32 [batch or 1, edges], the edge numbers in the forward pass; may be absent
  BatchOperand gathered;              // data of the forward pass, if ties are shared
  BatchOperand extrema;               // its output, likewise
  bool shares_ties = false;
  void* d_data = nullptr;  // [batch, problem.segments, features]

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
