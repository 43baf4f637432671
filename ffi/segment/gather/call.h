// Calls of the gradients of segment_sum and segment_mean.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// Every row receives its segment's cells, divided by the count if there is one; dropped rows receive 0.
struct GatherCall : SegmentCall {  // problem.data_is_shared is unused
  BatchOperand cells;              // [batch or 1, segments, features]
  BatchOperand count;              // int32 [batch or 1, segments] to divide the cells by, of means
  void* rows = nullptr;            // [batch, rows, features]

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
