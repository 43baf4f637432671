// Maxima and minima in registers, without winners.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceMaximum(const ExtremumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchOrdered), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename MaxReduction<T>::Outputs outputs{static_cast<T*>(call.output),
                                                    FlipWordMask<T>(call.type, call.is_minimum)};
    return LaunchReduction<MaxReduction<T>>(call, plan, outputs, stream);
  });
}

}  // namespace jax_baracuda::segment
