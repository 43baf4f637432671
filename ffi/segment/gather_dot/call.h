// Calls of gather_segment_dot.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// For each edge and head, the dot product of the segment's cells and the gathered row. Gather ids out of range name the
// nearest row. `edge_order` gives the edge to which the results at each position belong.
struct GatherDotCall : GatheringCall {
  BatchOperand cells;  // [batch or 1, segments, heads, features of a head]
  int64_t heads = 0, head_features = 0;
  bool is_wide = false;    // whether results are unrounded, in the accumulation type
  void* output = nullptr;  // [batch, edges, heads]

  bool HasNoElement() const { return problem.batch == 0 || problem.rows == 0 || heads == 0; }

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
