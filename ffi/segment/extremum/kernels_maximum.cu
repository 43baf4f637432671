// Maxima and minima in registers, without winners.
#include "ffi/segment/extremum/reduce.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceMaximum(const ExtremumCall& arguments, Strategy strategy, int64_t state_bytes, cudaStream_t stream) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchOrdered(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename MaxReduction<T>::Outputs outputs{static_cast<T*>(arguments.output),
                                                    FlipWordMask<T>(arguments.type, arguments.is_minimum)};
    status = LaunchReduction<MaxReduction<T>>(arguments, strategy, state_bytes, outputs, arguments.order, stream);
  });
  return status;
}

}  // namespace jax_baracuda::segment
