// Calls of gather_segment_sum.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// Each gathered row is multiplied by the weights of its edge. `edge_order` gives the edge at each position.
struct GatherSumCall : GatheringCall {
  bool clips_gather_ids = false;  // ids out of range name the nearest row; otherwise those edges add nothing
  bool has_weights = false;
  BatchOperand weights;    // [batch or 1, edges, heads]
  int64_t heads = 1;       // of equal width
  bool is_wide = false;    // whether sums are unrounded, in the accumulation type
  void* output = nullptr;  // [batch, segments, features]

  int64_t FeaturesPerHead() const { return heads == 0 ? 0 : problem.features / heads; }

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
