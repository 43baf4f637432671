// Launchers of the CUDA kernels of gather_segment_dot, callable from plain C++. They write every element of the result
// and only enqueue work on `stream`: no allocation, no synchronisation, and the same launches for the same problem.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/gather_dot/call.h"

namespace jax_baracuda::segment {

// How LaunchGatherDot runs, from shapes alone.
Plan PlanGatherDot(const GatherDotCall& call);

CudaStatus LaunchGatherDot(const GatherDotCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::segment
