// Maxima and minima of gathered rows, with or without winners.
#include "ffi/segment/engine/gather.cuh"
#include "ffi/segment/extremum/reduction.cuh"
#include "ffi/segment/gather_extremum/call.h"

namespace jax_baracuda::segment {

namespace {

ReducePlan PlanOf(const GatherExtremumCall& call) {
  const int64_t element_bytes = ElementBytes(call.type);
  return PlanGathered(call, call.problem.features, call.with_winner ? PairStateBytes(element_bytes) : element_bytes);
}

CudaStatus GatherMaximum(const GatherExtremumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    status = ReduceGathered<MaxReduction<T>>(
        call, plan, GatheredRows<T>{EdgesOf(call, /*clips=*/true)},
        {static_cast<T*>(call.output), FlipWordMask<T>(call.type, call.is_minimum)}, stream);
  });
  return status;
}

CudaStatus GatherWithWinner(const GatherExtremumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto reduce = [&](auto first_wins) {
      using Reduction = WinnerReduction<T, decltype(first_wins)::value>;
      status = ReduceGathered<Reduction>(
          call, plan, GatheredRows<T, /*kTakesNumbers=*/true>{EdgesOf(call, /*clips=*/true)},
          {static_cast<T*>(call.output), call.winner, FlipWordMask<T>(call.type, call.is_minimum)}, stream);
    };
    if (call.first_wins) {
      reduce(std::true_type{});
    } else {
      reduce(std::false_type{});
    }
  });
  return status;
}

}  // namespace

Plan GatherExtremumCall::CudaPlan() const { return PlanOf(*this).Summary(); }

CudaStatus GatherExtremumCall::LaunchOnCuda(cudaStream_t stream) const {
  return with_winner ? GatherWithWinner(*this, PlanOf(*this), stream) : GatherMaximum(*this, PlanOf(*this), stream);
}

}  // namespace jax_baracuda::segment
