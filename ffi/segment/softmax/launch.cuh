// Launchers of the CUDA kernels of segment_softmax and its gradient, callable from plain C++. They write every element
// of the results and only enqueue work on `stream`: no allocation, no synchronisation, and the same launches for the
// same problem.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/softmax/call.h"

namespace jax_baracuda::segment {

// How LaunchSoftmax runs. Scratch memory depends on the shapes and flags alone, the strategy also on the number of
// multiprocessors.
Plan PlanSoftmax(const SoftmaxCall& call);

CudaStatus LaunchSoftmax(const SoftmaxCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::segment
