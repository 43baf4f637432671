// Means in registers.
#include "ffi/segment/sum/reduce.cuh"
#include "ffi/segment/sum/reduction.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceMean(const SumCall& arguments, Strategy strategy, int64_t state_bytes, cudaStream_t stream) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename MeanReduction<T>::Outputs outputs{static_cast<T*>(arguments.output), arguments.count};
    status = LaunchReduction<MeanReduction<T>>(arguments, strategy, state_bytes, outputs, nullptr, stream);
  });
  return status;
}

}  // namespace jax_baracuda::segment
