// Means in registers.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/sum/reduction.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceMean(const SumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename MeanReduction<T>::Outputs outputs{static_cast<T*>(call.output), call.count};
    return LaunchReduction<MeanReduction<T>>(call, plan, outputs, stream);
  });
}

}  // namespace jax_baracuda::segment
