// Maxima and minima of gathered rows in registers, with and without winners in separate files.
#pragma once

#include "ffi/segment/engine/gather.cuh"
#include "ffi/segment/extremum/reduction.cuh"
#include "ffi/segment/gather_extremum/launch.cuh"

namespace jax_baracuda::segment {

template <typename T, bool kFirstWins>
inline constexpr EdgeInput kEdgeInput<WinnerReduction<T, kFirstWins>> = EdgeInput::kNumber;

CudaStatus GatherMaximum(const GatherExtremumCall& call, const GatherGrid& grid, int64_t state_bytes,
                         cudaStream_t stream);
CudaStatus GatherWithWinner(const GatherExtremumCall& call, const GatherGrid& grid, int64_t state_bytes,
                            cudaStream_t stream);

}  // namespace jax_baracuda::segment
