// The rows of maxima and minima: argmax and argmin.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

Plan ArgCall::CudaPlan() const { return PlanByRule(*this, PairStateBytes(ElementBytes(type))).Summary(); }

CudaStatus ArgCall::LaunchOnCuda(cudaStream_t stream) const {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchWide(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename ArgReduction<T>::Outputs outputs{row, static_cast<int32_t>(problem.rows),
                                                    FlipWordMask<T>(type, is_minimum)};
    const ReducePlan plan = PlanByRule(*this, PairStateBytes(sizeof(T)));
    status = LaunchReduction<ArgReduction<T>>(*this, plan, outputs, stream);
  });
  return status;
}

}  // namespace jax_baracuda::segment
