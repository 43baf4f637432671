// Launchers of the CUDA kernels of where and its gradient, callable from plain C++.
//
// Each enqueues work on `stream` only: no allocation, no synchronisation, the same launches whenever the problem is the
// same. Every element of every result is written, also where there is nothing to sum.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/where/where.h"

namespace jax_baracuda::where {

cudaError_t LaunchSelect(const SelectCall& call, cudaStream_t stream);

cudaError_t LaunchSplit(const SplitCall& call, cudaStream_t stream);

// Bytes of scratch memory that LaunchSplit needs where it sums; calls no CUDA function.
int64_t SumScratchBytes(const Sum& sum, int64_t element_bytes, int num_sums);

// As LaunchSplit, which calls it where there is something to sum.
cudaError_t LaunchSums(const SplitCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::where
