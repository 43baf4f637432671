// Maxima and minima of gathered rows, with or without winners.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/extremum/reduction.cuh"
#include "ffi/segment/gather_extremum/call.h"

namespace jax_baracuda::segment {

namespace {

ReducePlan PlanOf(const GatherExtremumCall& call) {
  return PlanGathered(call, call.problem.features,
                      call.with_winner ? PairStateBytes(call.type) : ElementBytes(call.type));
}

CudaStatus GatherMaximum(const GatherExtremumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LaunchReduction<MaxReduction<T>>(call, plan,
                                            {static_cast<T*>(call.output), FlipWordMask<T>(call.type, call.is_minimum)},
                                            stream, GatheredRows<T>{EdgesOf(call, /*clips=*/true)});
  });
}

CudaStatus GatherWithWinner(const GatherExtremumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename WinnerReduction<T>::Outputs outputs{static_cast<T*>(call.output), call.winner,
                                                       FlipWordMask<T>(call.type, call.is_minimum), call.first_wins};
    return LaunchReduction<WinnerReduction<T>>(call, plan, outputs, stream,
                                               GatheredRows<T, /*kNeedsNumbers=*/true>{EdgesOf(call, /*clips=*/true)});
  });
}

}  // namespace

std::vector<const char*> GatherExtremumCall::Strategies() { return EdgeStrategies(); }

Plan GatherExtremumCall::MakePlan() const { return PlanOf(*this).Summary(); }

CudaStatus GatherExtremumCall::Run(cudaStream_t stream) const {
  return with_winner ? GatherWithWinner(*this, PlanOf(*this), stream) : GatherMaximum(*this, PlanOf(*this), stream);
}

}  // namespace jax_baracuda::segment
