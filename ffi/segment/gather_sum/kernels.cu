// Sums of gathered rows: the choice of a kernel.
#include "ffi/segment/gather_sum/launch.cuh"
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

// Rows are in tiles always: a gathered row is read by neighbouring threads, as whole vectors of it.
GatherGrid MakeGrid(const GatherSumCall& call) {
  const Problem& problem = call.problem;
  const Strategy strategy = problem.rows == 0             ? Strategy::kFill
                            : call.indices_are_sorted ? Strategy::kTiles
                                                      : Strategy::kSortThenTiles;
  // Edges and gathered rows are numbered through the batch in 32 bits.
  const bool fits = OrderFits(problem) && problem.batch * call.num_rows < static_cast<int64_t>(kDropped);
  return {strategy, fits ? problem.batch : 1, call.has_weights ? call.FeaturesPerHead() : problem.features};
}

const char* GatherStrategyName(Strategy strategy) {
  switch (strategy) {
    case Strategy::kFill:
      return "fill";
    case Strategy::kTiles:
      return "gather_tiles";
    default:
      return "sort_then_gather_tiles";
  }
}

}  // namespace

Plan PlanGatherSum(const GatherSumCall& call) {
  if (call.problem.HasNoResult()) return {kNothing};
  const GatherGrid grid = MakeGrid(call);
  const int64_t element_bytes = ElementBytes(call.type);
  Problem at_once = call.problem;
  at_once.batch = grid.elements_at_once;
  const int vector = TileVector(grid.strategy, grid.part_features, element_bytes);
  return {GatherStrategyName(grid.strategy),
          ScratchBytesAtOnce(at_once, grid.strategy, vector, element_bytes == 8 ? 8 : 4)};
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
                          : ReduceGathered</*kHasWeights=*/false>(call, grid, stream);
}

}  // namespace jax_baracuda::segment
