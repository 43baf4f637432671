// Sums of gathered rows: the choice of a kernel.
#include "ffi/segment/gather_sum/launch.cuh"
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

GatherGrid MakeGrid(const GatherSumCall& call) {
  return MakeGatherGrid(call.problem, call.num_rows, call.has_weights ? call.FeaturesPerHead() : call.problem.features);
}

}  // namespace

Plan PlanGatherSum(const GatherSumCall& call) {
  if (call.problem.HasNoResult()) return {kNothing};
  return PlanGather(call.problem, MakeGrid(call), ElementBytes(call.type), SumStateBytes(call.type));
}

CudaStatus LaunchGatherSum(const GatherSumCall& call, cudaStream_t stream) {
  const Problem& problem = call.problem;
  if (problem.HasNoResult()) return {};
  if (!SegmentsFit(problem.segments) || !SegmentsFit(call.num_rows) ||
      call.scratch_bytes < PlanGatherSum(call).scratch_bytes) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  const GatherGrid grid = MakeGrid(call);
  return call.has_weights ? LaunchWeightedGatherSum(call, grid, stream)
                          : SumGathered<EdgeInput::kNothing>(call, grid, stream);
}

}  // namespace jax_baracuda::segment
