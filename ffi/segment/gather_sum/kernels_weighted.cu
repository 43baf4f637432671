// Weighted sums of gathered rows.
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {

CudaStatus LaunchWeightedGatherSum(const GatherSumCall& call, const GatherGrid& grid, cudaStream_t stream) {
  return SumGathered<EdgeInput::kWeights>(call, grid, stream);
}

}  // namespace jax_baracuda::segment
