// The scalar arithmetic of segment_softmax and its gradient, shared by the CPU and the CUDA kernels.
//
// Values that are not finite need no special cases. If the maximum is infinite, the row that attains it has the weight
// exp(inf - inf), which is NaN, and the sum passes it to all rows of the segment, as in jax.nn.softmax.
#pragma once

#include <cmath>
#include <limits>

#include "ffi/core/element_type.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// The state of some rows of one segment and feature: the maximum (NaN if one of them is NaN), and the sum over the rows
// of exp(x - maximum). C is float or double. While the maximum is -inf, the sum stays 0, so that rows of -inf add
// nothing to finite ones.
template <typename C>
struct SoftmaxState {
  C maximum = -std::numeric_limits<C>::infinity();
  C sum = C{0};
};

// exp(x - maximum), but 0 for an x of -inf.
template <typename C>
JB_HOST_DEVICE C SoftmaxWeight(C x, C maximum) {
  return x == -std::numeric_limits<C>::infinity() ? C{0} : std::exp(x - maximum);
}

// Folds in the state of other rows of the same segment.
template <typename C>
JB_HOST_DEVICE void MergeSoftmax(SoftmaxState<C>& state, const SoftmaxState<C>& other) {
  const C maximum = other.maximum > state.maximum || other.maximum != other.maximum ? other.maximum : state.maximum;
  state.sum = state.sum * SoftmaxWeight(state.maximum, maximum) + other.sum * SoftmaxWeight(other.maximum, maximum);
  state.maximum = maximum;
}

// The gradient for a row; `product_sum` is the sum of probability * d_probability over the rows of its segment.
template <typename C>
JB_HOST_DEVICE C SoftmaxGradient(C probability, C d_probability, C product_sum) {
  return probability * (d_probability - product_sum);
}

}  // namespace jax_baracuda::segment
