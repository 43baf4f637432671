// Maxima and minima of gathered rows, without winners, and the choice of a kernel.
#include "ffi/segment/gather_extremum/reduce.cuh"

namespace jax_baracuda::segment {
namespace {

GatherGrid MakeGrid(const GatherExtremumCall& call) {
  return MakeGatherGrid(call.problem, call.num_rows, call.problem.features);
}

int64_t StateBytes(const GatherExtremumCall& call) {
  const int64_t element_bytes = ElementBytes(call.type);
  return call.with_winner ? PairStateBytes(element_bytes) : element_bytes;
}

}  // namespace

CudaStatus GatherMaximum(const GatherExtremumCall& call, const GatherGrid& grid, int64_t state_bytes,
                         cudaStream_t stream) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    status = ReduceGathered<MaxReduction<T>>(
        call, grid, GatheringOf<T>(call, /*clips=*/true), state_bytes,
        {static_cast<T*>(call.output), FlipWordMask<T>(call.type, call.is_minimum)}, stream);
  });
  return status;
}

Plan PlanGatherExtremum(const GatherExtremumCall& call) {
  if (call.problem.HasNoResult()) return {kNothing};
  return PlanGather(call.problem, MakeGrid(call), ElementBytes(call.type), StateBytes(call));
}

CudaStatus LaunchGatherExtremum(const GatherExtremumCall& call, cudaStream_t stream) {
  const Problem& problem = call.problem;
  if (problem.HasNoResult()) return {};
  if (!SegmentsFit(problem.segments) || !SegmentsFit(call.num_rows) ||
      call.scratch_bytes < PlanGatherExtremum(call).scratch_bytes) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  const auto reduce = call.with_winner ? GatherWithWinner : GatherMaximum;
  return reduce(call, MakeGrid(call), StateBytes(call), stream);
}

}  // namespace jax_baracuda::segment
