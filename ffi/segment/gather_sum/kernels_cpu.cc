// The CPU kernels of gather_segment_sum.

#include <cstdint>

#include "ffi/segment/gather_sum/handler.h"
#include "ffi/segment/gather_sum/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

bool RunGatherSum(ffi::ThreadPool& pool, const GatherSumCall& call) {
  const Problem& problem = call.problem;
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GatherSum<T> reduction{call.output, call.is_wide};
    const int64_t element_bytes = call.is_wide ? sizeof(ComputeType<T>) : sizeof(T);
    AdviseHugePages(reduction.output, problem.batch * problem.segments * problem.features * element_bytes);
    const GatheredRows<T> rows{call, call.clips_gather_ids, static_cast<const T*>(call.weights),
                               call.weights_are_shared, call.heads};
    has_memory = ReduceAll(pool, problem, SegmentIds(call), rows, reduction);
  });
  return has_memory;
}

Plan PlanGatherSum(const GatherSumCall& call) {
  return PlanOfType(call, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    return ChooseStrategy<GatherSum<typename decltype(tag)::type>>(call.problem, /*has_counts=*/false);
  });
}

JB_CPU_TARGET("gather_segment_sum", (HandleGatherSum<ffi::ThreadPool, RunOnCpu<GatherSumCall, RunGatherSum>>),
              BindGatherSum<ffi::ThreadPool>(), (PlanOf<PlanGatherSum, GatherSumCallOf>), kNothing, "scan",
              "split_scan", "group_by_segment");

}  // namespace
}  // namespace jax_baracuda::segment
