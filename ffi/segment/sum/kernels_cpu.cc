// The CPU kernels of segment_sum and segment_mean, also of those that accumulate in float64.

#include <cstdint>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/sum/handler.h"
#include "ffi/segment/sum/reduction_cpu.h"

namespace jax_baracuda::segment {

JB_FOLD_NARROW(Sum<float>);
JB_FOLD_NARROW(Sum<double>);

namespace {

template <typename T, typename C>
bool Reduce(ffi::ThreadPool& pool, const SumCall& call) {
  const Problem& problem = call.problem;
  AdviseHugePages(call.output, problem.NumCells() * sizeof(T));
  const Sum<T, C> sum{call.output, /*is_wide=*/false, call.is_mean ? problem.features : 0};
  return ReduceRows(pool, call, call.data, sum, call.count);
}

bool RunSum(ffi::ThreadPool& pool, const SumCall& call) {
  if (call.in_float64) {
    return DispatchOr(true, call.type, JB_DISPATCH(DispatchBelowFloat64),
                      [&](auto tag) { return Reduce<typename decltype(tag)::type, double>(pool, call); });
  }
  return DispatchOr(true, call.type, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Reduce<T, ComputeType<T>>(pool, call);
  });
}

Plan PlanSum(const SumCall& call) {
  return call.in_float64 ? PlanReduction<Float64SumOf>(call, JB_DISPATCH(DispatchBelowFloat64), call.is_mean)
                         : PlanReduction<SumOf>(call, JB_DISPATCH(DispatchWrapping), call.is_mean);
}

constexpr auto kRun = RunOnCpu<SumCall, RunSum>;

JB_CPU_TARGET((kSumName<false, false>), (HandleSum<ffi::ThreadPool, kRun, /*kIsMean=*/false, /*kInFloat64=*/false>),
              (PlanOf<PlanSum, SumCallOf<false, false>>), RoundingStrategies());
JB_CPU_TARGET((kSumName<true, false>), (HandleSum<ffi::ThreadPool, kRun, /*kIsMean=*/true, /*kInFloat64=*/false>),
              (PlanOf<PlanSum, SumCallOf<true, false>>), RoundingStrategies());
JB_CPU_TARGET((kSumName<false, true>), (HandleSum<ffi::ThreadPool, kRun, /*kIsMean=*/false, /*kInFloat64=*/true>),
              (PlanOf<PlanSum, SumCallOf<false, true>>), RoundingStrategies());
JB_CPU_TARGET((kSumName<true, true>), (HandleSum<ffi::ThreadPool, kRun, /*kIsMean=*/true, /*kInFloat64=*/true>),
              (PlanOf<PlanSum, SumCallOf<true, true>>), RoundingStrategies());

}  // namespace
}  // namespace jax_baracuda::segment
