// The launchers of write_slice and its gradient. Errors of launches are returned.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "ffi/write_slice/write_slice.h"

namespace jax_baracuda::write_slice {

// Writes the windows' contents into their arrays.
cudaError_t LaunchWrite(const std::vector<Update>& updates, cudaStream_t stream);

// Takes the windows' contents out of their arrays and leaves zeros; what lies outside of an array is zero. Not where
// rows begin or end within bytes.
cudaError_t LaunchTake(const std::vector<Update>& updates, cudaStream_t stream);

}  // namespace jax_baracuda::write_slice
