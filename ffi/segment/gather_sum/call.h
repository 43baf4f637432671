// Calls of gather_segment_sum.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// The row that an edge gathers is multiplied by its weight; `edge_order` tells which weight is its own.
struct GatherSumCall : GatheringCall {
  bool clips_gather_ids = false;  // ids out of range name the nearest row; else these edges add nothing
  bool has_weights = false;
  const void* weights = nullptr;  // [batch or 1, edges, heads]
  bool weights_are_shared = false;
  int64_t heads = 1;       // of equally many features
  bool is_wide = false;    // whether sums are returned as they are accumulated, unrounded
  void* output = nullptr;  // [batch, segments, features]

  int64_t FeaturesPerHead() const { return heads == 0 ? 0 : problem.features / heads; }
};

}  // namespace jax_baracuda::segment
