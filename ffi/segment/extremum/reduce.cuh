// Maxima and minima in registers (see engine/reduce.cuh). Each has its own file because these compile the most kernels.
#pragma once

#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/extremum/launch.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceMaximum(const ExtremumCall& arguments, Strategy strategy, int64_t state_bytes, cudaStream_t stream);

CudaStatus ReduceWithWinner(const ExtremumCall& arguments, Strategy strategy, int64_t state_bytes, cudaStream_t stream);

}  // namespace jax_baracuda::segment
