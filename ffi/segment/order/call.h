// Calls of segment_order.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct OrderCall : SegmentCall {  // without data: problem.features is 1
  int32_t* order = nullptr;       // [batch, rows]
  int32_t* sorted_ids = nullptr;  // [batch, rows]; the number of segments for a row that is dropped

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
