// Maxima and minima with winners, in registers.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceWithWinner(const ExtremumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename WinnerReduction<T>::Outputs outputs{static_cast<T*>(call.output), call.winner,
                                                       FlipWordMask<T>(call.type, call.is_minimum), call.first_wins};
    return LaunchReduction<WinnerReduction<T>>(call, plan, outputs, stream);
  });
}

}  // namespace jax_baracuda::segment
