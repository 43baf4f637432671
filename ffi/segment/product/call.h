// Calls of segment_prod and its gradient.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct ProductCall : SegmentCall {
  const void* data = nullptr;
  void* output = nullptr;
  void* mantissa = nullptr;   // with `packed`, the residual for the gradient (see arithmetic.h); or nullptr
  int32_t* packed = nullptr;  // see `mantissa`

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

struct ProductBackwardCall : SegmentCall {
  BatchOperand d_output;
  BatchOperand mantissa, packed;  // the residual; `packed` is int32
  BatchOperand data;
  void* d_data = nullptr;

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
