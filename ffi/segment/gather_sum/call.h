// Calls of gather_segment_sum.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// A row of the problem is an edge: the row of `data` that its gather id names, times its weight.
struct GatherSumCall : SegmentCall {
  const void* data = nullptr;  // [batch or 1, num_rows, features]
  int64_t num_rows = 0;
  const int32_t* gather_ids = nullptr;  // [batch or 1, edges]
  bool gather_ids_are_shared = false;
  bool clips_gather_ids = false;  // ids out of range name the nearest row; else these edges add nothing
  bool has_weights = false;
  const void* weights = nullptr;  // [batch or 1, edges, heads]
  bool weights_are_shared = false;
  int64_t heads = 1;  // of equally many features
  // [batch or 1, edges], the edge at each place, whose weight it takes; or nullptr
  const int32_t* edge_order = nullptr;
  bool edge_order_is_shared = false;
  bool is_wide = false;    // whether sums are returned as they are accumulated, unrounded
  void* output = nullptr;  // [batch, segments, features]

  int64_t FeaturesPerHead() const { return heads == 0 ? 0 : problem.features / heads; }
};

}  // namespace jax_baracuda::segment
