// A call of rope_write, for both back ends: queries and keys are rotated, and keys and values are written to slots of
// pools. Queries are [batch, rows, heads, features], keys [batch, rows, heads of keys, features].
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/core/element_type.h"
#include "ffi/core/executor.h"
#include "ffi/core/plan.h"
#include "ffi/rope/rope.h"
#include "ffi/write_rows/write_rows.h"

namespace jax_baracuda::rope_write {

inline constexpr int32_t kKeys = 0, kValues = 1;  // the numbers of the pools

struct Call {
  write_rows::Call write;  // the pools of keys and of values, unless they have no work
  ElementType type;        // of queries, keys and values
  rope::Tensor queries;
  // The rows are the positions of the only example of each batch element. They have heads in neighbouring memory.
  rope::Problem problem;
  BatchOperand frequencies;  // as in rope::Call
  rope::Positions positions;
  double scale;

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::rope_write
