// The launchers of write_slice and its gradient. They return launch errors.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/write_slice/write_slice.h"

namespace jax_baracuda::write_slice {

// Writes the windows' contents into their arrays.
CudaStatus LaunchWrite(const Call& call, cudaStream_t stream);

// Moves the windows' contents out of their arrays and leaves zeros there. Content outside an array is zero. Not
// supported if rows begin or end inside bytes.
CudaStatus LaunchTake(const Call& call, cudaStream_t stream);

}  // namespace jax_baracuda::write_slice
