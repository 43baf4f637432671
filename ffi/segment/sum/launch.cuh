// Launchers of the CUDA kernels of segment_sum, segment_mean and segment_sum_of_exponentials, callable from plain C++.
// They write every element of the results and only enqueue work on `stream`: no allocation, no synchronisation, and the
// same launches for the same problem.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/sum/call.h"

namespace jax_baracuda::segment {

// How LaunchSum runs, from shapes and flags alone.
Plan PlanSum(const SumCall& call);

CudaStatus LaunchSum(const SumCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::segment
