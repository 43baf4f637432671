// The positions of maxima and minima.
#include "ffi/segment/extremum.cuh"
#include "ffi/segment/extremum_device.cuh"
#include "ffi/segment/reduce.cuh"

namespace jax_baracuda::segment {

int64_t ArgScratchBytes(const Problem& problem, int64_t element_bytes, bool indices_are_sorted) {
  return PairScratchBytes(problem, element_bytes, indices_are_sorted);
}

cudaError_t LaunchArg(const ArgArguments& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  if (problem.HasNoResult()) return cudaSuccess;
  cudaError_t error = cudaErrorInvalidValue;
  DispatchWide(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename ArgReduction<T>::Outputs outputs{arguments.row, static_cast<int32_t>(problem.rows),
                                                    FlipWordMask<T>(arguments.type, arguments.is_minimum)};
    error = LaunchPairReduction<ArgReduction<T>>(arguments, outputs, stream);
  });
  return error;
}

}  // namespace jax_baracuda::segment
