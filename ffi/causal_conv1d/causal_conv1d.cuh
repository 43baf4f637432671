// Launchers of the CUDA kernels of causal_conv1d, callable from plain C++.
//
// Each enqueues work on `stream` only: no allocation, no synchronisation, the same launches whenever the problem is the
// same. Every element of every result is written, also where there is nothing to sum.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/causal_conv1d/causal_conv1d.h"

namespace jax_baracuda::causal_conv1d {

cudaError_t LaunchForward(const ForwardCall& call, cudaStream_t stream);

// Bytes of scratch memory that LaunchBackward needs. Depends on shapes and flags alone; calls no CUDA function.
int64_t BackwardScratchBytes(const Problem& problem, int64_t element_bytes);

cudaError_t LaunchBackward(const BackwardCall& call, cudaStream_t stream);

cudaError_t LaunchUpdate(const UpdateCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::causal_conv1d
