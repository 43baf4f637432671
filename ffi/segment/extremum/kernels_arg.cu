// The rows of maxima and minima: argmax and argmin.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/extremum/launch.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

Plan PlanArg(const ArgCall& call) { return PlanByRule(call, PairStateBytes(ElementBytes(call.type))); }

CudaStatus LaunchArg(const ArgCall& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  if (problem.HasNoResult()) return {};
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchWide(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename ArgReduction<T>::Outputs outputs{arguments.row, static_cast<int32_t>(problem.rows),
                                                    FlipWordMask<T>(arguments.type, arguments.is_minimum)};
    status = LaunchByRule<ArgReduction<T>>(arguments, PairStateBytes(sizeof(T)), outputs, stream);
  });
  return status;
}

}  // namespace jax_baracuda::segment
