// Calls of segment_softmax and its gradient.
#pragma once

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct SoftmaxCall : SegmentCall {
  bool is_backward = false;
  BatchOperand inputs[2];  // logits; or probabilities and their cotangents
  void* output = nullptr;

  bool HasNoResult() const { return problem.batch * problem.rows * problem.features == 0; }

  // A call of another op that reduces the rows of the first input, without its results.
  template <typename Call>
  Call ReductionAs() const {
    Call reduction;
    static_cast<SegmentCall&>(reduction) = *this;
    reduction.data = inputs[0].data;
    return reduction;
  }

  static std::vector<const char*> Strategies(bool is_backward);
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
