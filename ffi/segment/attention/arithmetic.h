// The arithmetic of attention over edges, shared by the CPU and the CUDA kernels. C is float or double.
//
// A segment whose logits are all -inf gives 0, as one without edges: maxima start at the lowest finite number, and a
// total of 0 divides nothing. NaN and +inf give NaN.
#pragma once

#include <cmath>
#include <limits>

#include "ffi/core/host_device.h"
#include "ffi/segment/attention/call.h"

namespace jax_baracuda::segment {

template <typename C>
inline constexpr C kLowestLogit = std::numeric_limits<C>::lowest();

// The logit is Logit of the sum of the features' terms. OfSum gives the derivative by this sum, ByQuery and ByKey those
// of the sum by a feature of the query and of the key.
template <typename C>
struct DotScore {
  static constexpr bool kIsGiven = false, kIsAdditive = false;
  C scale;

  static DotScore Of(const AttentionCall& call) { return {static_cast<C>(call.scale)}; }

  JB_HOST_DEVICE C Term(C query, C key, C /*weight*/) const { return query * key; }
  JB_HOST_DEVICE C Logit(C sum) const { return scale * sum; }
  JB_HOST_DEVICE C OfSum(C d_logit) const { return scale * d_logit; }
  JB_HOST_DEVICE C ByQuery(C /*query*/, C key, C /*weight*/) const { return key; }
  JB_HOST_DEVICE C ByKey(C query, C /*key*/, C /*weight*/) const { return query; }
};

template <typename C>
struct AdditiveScore {
  static constexpr bool kIsGiven = false, kIsAdditive = true;
  C slope;  // of negative numbers

  static AdditiveScore Of(const AttentionCall& call) { return {static_cast<C>(call.negative_slope)}; }

  JB_HOST_DEVICE C Leaky(C x) const { return x >= C{0} ? x : slope * x; }
  JB_HOST_DEVICE C Term(C query, C key, C weight) const { return weight * Leaky(query + key); }
  JB_HOST_DEVICE C Logit(C sum) const { return sum; }
  JB_HOST_DEVICE C OfSum(C d_logit) const { return d_logit; }
  JB_HOST_DEVICE C ByQuery(C query, C key, C weight) const { return query + key >= C{0} ? weight : slope * weight; }
  JB_HOST_DEVICE C ByKey(C query, C key, C weight) const { return ByQuery(query, key, weight); }
};

// The bias is the logit.
template <typename C>
struct GivenLogits {
  static constexpr bool kIsGiven = true, kIsAdditive = false;

  static GivenLogits Of(const AttentionCall&) { return {}; }
};

// Calls body(score), where score is one of the above. kAllowsGiven: whether the logits may be given.
template <typename C, bool kAllowsGiven, typename Body>
auto DispatchScore(const AttentionCall& call, const Body& body) {
  if constexpr (kAllowsGiven) {
    if (call.score == ScoreKind::kGiven) return body(GivenLogits<C>::Of(call));
  }
  return call.score == ScoreKind::kAdditive ? body(AdditiveScore<C>::Of(call)) : body(DotScore<C>::Of(call));
}

// The reciprocal of a total; 0 for that of no finite logit.
template <typename C>
JB_HOST_DEVICE C InverseTotal(C total) {
  return total == C{0} ? C{0} : C{1} / total;
}

}  // namespace jax_baracuda::segment
