// Calls of gather_segment_dot.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// A row of the problem is an edge: for each of its heads, the product of its segment's cells and of its gathered row.
struct GatherDotCall : SegmentCall {
  const void* cells = nullptr;  // [batch or 1, segments, heads, features of a head]
  bool cells_are_shared = false;
  const void* data = nullptr;  // [batch or 1, num_rows, heads, features of a head]
  bool data_is_shared = false;
  int64_t num_rows = 0;
  int64_t heads = 0, head_features = 0;
  const int32_t* gather_ids = nullptr;  // [batch or 1, edges]; those out of range name the nearest row
  bool gather_ids_are_shared = false;
  const int32_t* edge_order = nullptr;  // [batch or 1, edges], where the results of each edge go; or nullptr
  bool edge_order_is_shared = false;
  bool is_wide = false;    // whether results are returned as they are accumulated, unrounded
  void* output = nullptr;  // [batch, edges, heads]

  bool HasNoElement() const { return problem.batch == 0 || problem.rows == 0 || heads == 0; }
};

}  // namespace jax_baracuda::segment
