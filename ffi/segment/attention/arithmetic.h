// The arithmetic of attention over edges, shared by the CPU and the CUDA kernels. C is float or double.
//
// A segment whose logits are all -inf gives 0, as one without edges: maxima start at the lowest finite number, and a
// total of 0 divides nothing. NaN and +inf give NaN.
#pragma once

#include <cmath>
#include <limits>

#include "ffi/core/host_device.h"

namespace jax_baracuda::segment {

template <typename C>
inline constexpr C kLowestLogit = std::numeric_limits<C>::lowest();

// What a feature adds to a logit, and the derivative of the logit with respect to query and key.
template <typename C>
struct DotScore {
  static constexpr bool kIsAdditive = false;
  C parameter;  // the scale

  JB_HOST_DEVICE C Term(C query, C key, C /*weight*/) const { return query * key; }
  JB_HOST_DEVICE C Logit(C sum) const { return parameter * sum; }
  JB_HOST_DEVICE C ByQuery(C /*query*/, C key, C /*weight*/) const { return parameter * key; }
  JB_HOST_DEVICE C ByKey(C query, C /*key*/, C /*weight*/) const { return parameter * query; }
};

template <typename C>
struct AdditiveScore {
  static constexpr bool kIsAdditive = true;
  C parameter;  // the slope of negative numbers

  JB_HOST_DEVICE C Leaky(C x) const { return x >= C{0} ? x : parameter * x; }
  JB_HOST_DEVICE C Term(C query, C key, C weight) const { return weight * Leaky(query + key); }
  JB_HOST_DEVICE C Logit(C sum) const { return sum; }
  JB_HOST_DEVICE C ByQuery(C query, C key, C weight) const { return query + key >= C{0} ? weight : parameter * weight; }
  JB_HOST_DEVICE C ByKey(C query, C key, C weight) const { return ByQuery(query, key, weight); }
};

// The reciprocal of a total; 0 for that of no finite logit.
template <typename C>
JB_HOST_DEVICE C InverseTotal(C total) {
  return total == C{0} ? C{0} : C{1} / total;
}

}  // namespace jax_baracuda::segment
