// Maxima and minima with winners, in registers.
#include "ffi/segment/extremum/reduce.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceWithWinner(const ExtremumCall& arguments, Strategy strategy, int64_t state_bytes,
                            cudaStream_t stream) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto reduce = [&](auto first_wins) {
      using Reduction = WinnerReduction<T, decltype(first_wins)::value>;
      const typename Reduction::Outputs outputs{static_cast<T*>(arguments.output), arguments.winner,
                                                FlipWordMask<T>(arguments.type, arguments.is_minimum)};
      status = LaunchReduction<Reduction>(arguments, strategy, state_bytes, outputs, arguments.order, stream);
    };
    if (arguments.first_wins) {
      reduce(std::true_type{});
    } else {
      reduce(std::false_type{});
    }
  });
  return status;
}

}  // namespace jax_baracuda::segment
