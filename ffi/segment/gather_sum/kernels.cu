// Sums of gathered rows, with or without weights.
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

ReducePlan PlanOf(const GatherSumCall& call) {
  return PlanGathered(call, call.has_weights ? call.FeaturesPerHead() : call.problem.features,
                      SumStateBytes(call.type));
}

template <EdgeInput kInput>
CudaStatus SumGathered(const GatherSumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Gathering<T> gathering = GatheringOf<T>(call, call.clips_gather_ids);
    gathering.weights = static_cast<const T*>(call.weights);
    gathering.weights_are_shared = call.weights_are_shared;
    gathering.heads = call.heads;
    gathering.features_per_head = call.FeaturesPerHead();
    status = ReduceGathered<GatherSumReduction<T, kInput>>(call, plan, gathering, {call.output, call.is_wide}, stream);
  });
  return status;
}

}  // namespace

Plan GatherSumCall::CudaPlan() const { return PlanOf(*this).Summary(); }

CudaStatus GatherSumCall::LaunchOnCuda(cudaStream_t stream) const {
  const ReducePlan plan = PlanOf(*this);
  return has_weights ? SumGathered<EdgeInput::kWeights>(*this, plan, stream)
                     : SumGathered<EdgeInput::kNothing>(*this, plan, stream);
}

}  // namespace jax_baracuda::segment
