// Launchers of the CUDA kernels of segment_max, segment_min, segment_argmax, segment_argmin and their gradients,
// callable from plain C++. They write every element of the results and only enqueue work on `stream`: no allocation, no
// synchronisation, and the same launches for the same problem.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/extremum/call.h"

namespace jax_baracuda::segment {

// How the launchers below run, from shapes and flags alone.
Plan PlanExtremum(const ExtremumCall& call);
Plan PlanExtremumBackward(const ExtremumBackwardCall& call);
Plan PlanArg(const ArgCall& call);

// `order` may be nullptr.
CudaStatus LaunchExtremum(const ExtremumCall& call, cudaStream_t stream);

CudaStatus LaunchExtremumBackward(const ExtremumBackwardCall& call, cudaStream_t stream);

// The first row that attains each cell's maximum; the number of rows for an empty segment.
CudaStatus LaunchArg(const ArgCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::segment
