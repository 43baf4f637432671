// Launchers of the CUDA kernels of gather_segment_sum, callable from plain C++. They write every element of the result
// and only enqueue work on `stream`: no allocation, no synchronisation, and the same launches for the same problem.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/gather_sum/call.h"

namespace jax_baracuda::segment {

// How LaunchGatherSum runs, from shapes and flags alone.
Plan PlanGatherSum(const GatherSumCall& call);

CudaStatus LaunchGatherSum(const GatherSumCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::segment
