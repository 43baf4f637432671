// Launchers of the CUDA kernels of the gradients of segment_sum and segment_mean, callable from plain C++. They write
// every element of the results and only enqueue work on `stream`: no allocation, no synchronisation, and the same
// launches for the same problem.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/gather/call.h"

namespace jax_baracuda::segment {

// How LaunchGather runs, from shapes alone.
Plan PlanGather(const GatherCall& call);

// Writes its segment's cells, divided by the count if there is one, to every row; 0 to dropped rows.
CudaStatus LaunchGather(const GatherCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::segment
