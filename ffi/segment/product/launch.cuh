// Launchers of the CUDA kernels of segment_prod and its gradient, callable from plain C++. They write every element of
// the results and only enqueue work on `stream`: no allocation, no synchronisation, and the same launches for the same
// problem.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/product/call.h"

namespace jax_baracuda::segment {

// How the launchers below run, from shapes and flags alone.
Plan PlanProduct(const ProductCall& call);
Plan PlanProductBackward(const ProductBackwardCall& call);

CudaStatus LaunchProduct(const ProductCall& call, cudaStream_t stream);
CudaStatus LaunchProductBackward(const ProductBackwardCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::segment
