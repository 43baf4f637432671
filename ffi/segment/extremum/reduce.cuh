// Maxima and minima in registers (see reduce.cuh), each in a file of its own: these have the most kernels.
#pragma once

#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/extremum/launch.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceMaximum(const ExtremumCall& arguments, Strategy strategy, int64_t state_bytes, cudaStream_t stream);

CudaStatus ReduceWithWinner(const ExtremumCall& arguments, Strategy strategy, int64_t state_bytes, cudaStream_t stream);

}  // namespace jax_baracuda::segment
