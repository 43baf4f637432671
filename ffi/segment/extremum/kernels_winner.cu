// Maxima and minima with winners, in registers.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceWithWinner(const ExtremumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto reduce = [&](auto first_wins) {
      using Reduction = WinnerReduction<T, decltype(first_wins)::value>;
      const typename Reduction::Outputs outputs{static_cast<T*>(call.output), call.winner,
                                                FlipWordMask<T>(call.type, call.is_minimum)};
      return LaunchReduction<Reduction>(call, plan, outputs, stream);
    };
    return call.first_wins ? reduce(std::true_type{}) : reduce(std::false_type{});
  });
}

}  // namespace jax_baracuda::segment
