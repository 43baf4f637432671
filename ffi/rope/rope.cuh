// Launcher of the CUDA kernel of rope, callable from plain C++.
//
// It enqueues work on `stream` only: no allocation, no synchronisation, the same launch if the problem is the same.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

cudaError_t LaunchRope(const Call& call, cudaStream_t stream);

}  // namespace jax_baracuda::rope
