// Launchers of the CUDA kernels of gather_segment_max, gather_segment_min and their gradients, callable from plain C++.
// They write every element of the results and only enqueue work on `stream`: no allocation, no synchronisation, and the
// same launches for the same problem.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/gather_extremum/call.h"

namespace jax_baracuda::segment {

// How the launchers below run, from shapes and flags alone.
Plan PlanGatherExtremum(const GatherExtremumCall& call);
Plan PlanGatherExtremumBackward(const GatherExtremumBackwardCall& call);

CudaStatus LaunchGatherExtremum(const GatherExtremumCall& call, cudaStream_t stream);
CudaStatus LaunchGatherExtremumBackward(const GatherExtremumBackwardCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::segment
