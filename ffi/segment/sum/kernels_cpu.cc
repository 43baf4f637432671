// The CPU kernels of segment_sum and segment_mean.

#include <cstdint>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/sum/handler.h"
#include "ffi/segment/sum/reduction_cpu.h"

namespace jax_baracuda::segment {

JB_FOLD_NARROW(Sum<float>);
JB_FOLD_NARROW(Sum<double>);

namespace {

bool RunSum(ffi::ThreadPool& pool, const SumCall& call) {
  const Problem& problem = call.problem;
  return DispatchOr(true, call.type, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const output = static_cast<T*>(call.output);
    AdviseHugePages(output, problem.NumCells() * sizeof(T));
    const Sum<T> sum{output, /*is_wide=*/false, call.is_mean ? problem.features : 0};
    return ReduceRows(pool, call, call.data, sum, call.count);
  });
}

Plan PlanSum(const SumCall& call) {
  return PlanReduction<Sum>(call, JB_DISPATCH(DispatchWrapping), /*has_counts=*/call.is_mean);
}

constexpr auto kRun = RunOnCpu<SumCall, RunSum>;

JB_CPU_TARGET(SumCall::kSumName, (HandleSum<ffi::ThreadPool, SumCall, kRun, /*kIsMean=*/false>),
              (PlanOf<PlanSum, SumCallOf<SumCall, false>>), RoundingStrategies());
JB_CPU_TARGET(SumCall::kMeanName, (HandleSum<ffi::ThreadPool, SumCall, kRun, /*kIsMean=*/true>),
              (PlanOf<PlanSum, SumCallOf<SumCall, true>>), RoundingStrategies());

}  // namespace
}  // namespace jax_baracuda::segment
