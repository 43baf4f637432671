// The launcher of the CUDA kernels of segment_order, callable from plain C++. It writes every element of the results
// and only enqueues work on `stream`: no allocation, no synchronisation, and the same launches for the same problem.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/order/call.h"

namespace jax_baracuda::segment {

// How LaunchOrder runs, from shapes alone.
Plan PlanOrder(const OrderCall& call);

CudaStatus LaunchOrder(const OrderCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::segment
