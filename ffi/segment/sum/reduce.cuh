// Means in registers (see engine/reduce.cuh), in a separate file: they compile as many kernels as sums.
#pragma once

#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/sum/launch.cuh"

namespace jax_baracuda::segment {

CudaStatus ReduceMean(const SumCall& arguments, Strategy strategy, int64_t state_bytes, cudaStream_t stream);

}  // namespace jax_baracuda::segment
