// The CUDA target of gather_segment_dot.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/gather_dot/handler.h"

namespace jax_baracuda::segment {
namespace {

JB_CUDA_TARGET("gather_segment_dot", (HandleGatherDot<cudaStream_t, RunOnCuda<GatherDotCall>>),
               (CudaPlanOf<GatherDotCallOf>), kNothing, "edge_vectors");

}  // namespace
}  // namespace jax_baracuda::segment
