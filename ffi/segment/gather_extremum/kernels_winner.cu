// Maxima and minima of gathered rows, with winners.
#include "ffi/segment/gather_extremum/reduce.cuh"

namespace jax_baracuda::segment {

CudaStatus GatherWithWinner(const GatherExtremumCall& call, const GatherGrid& grid, int64_t state_bytes,
                            cudaStream_t stream) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto reduce = [&](auto first_wins) {
      using Reduction = WinnerReduction<T, decltype(first_wins)::value>;
      status = ReduceGathered<Reduction>(
          call, grid, GatheringOf<T>(call, /*clips=*/true), state_bytes,
          {static_cast<T*>(call.output), call.winner, FlipWordMask<T>(call.type, call.is_minimum)}, stream);
    };
    if (call.first_wins) {
      reduce(std::true_type{});
    } else {
      reduce(std::false_type{});
    }
  });
  return status;
}

}  // namespace jax_baracuda::segment
