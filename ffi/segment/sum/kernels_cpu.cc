// The CPU kernels of segment_sum and segment_mean, also of those that accumulate in float64.

#include <cstdint>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/sum/call.h"
#include "ffi/segment/sum/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

template <typename T, typename C>
bool Reduce(ffi::ThreadPool& pool, const SumCall& call) {
  const Sum<T, C> sum{call.output, /*is_wide=*/false, call.is_mean ? call.problem.features : 0};
  return ReduceRows(pool, call, call.data, sum, call.count);
}

}  // namespace

std::vector<const char*> SumCall::Strategies(bool, bool) { return RoundingStrategies(); }

Plan SumCall::MakePlan() const {
  return in_float64 ? PlanReduction<Float64SumOf>(*this, JB_DISPATCH(DispatchBelowFloat64), is_mean)
                    : PlanReduction<SumOf>(*this, JB_DISPATCH(DispatchWrapping), is_mean);
}

bool SumCall::Run(ffi::ThreadPool& pool) const {
  if (in_float64) {
    return DispatchOr(true, type, JB_DISPATCH(DispatchBelowFloat64),
                      [&](auto tag) { return Reduce<typename decltype(tag)::type, double>(pool, *this); });
  }
  return DispatchOr(true, type, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Reduce<T, ComputeType<T>>(pool, *this);
  });
}

}  // namespace jax_baracuda::segment
