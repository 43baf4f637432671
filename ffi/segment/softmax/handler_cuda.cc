// The CUDA targets of segment_softmax and its gradient.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/softmax/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<SoftmaxCall>;

JB_CUDA_TARGET("segment_softmax", (HandleSoftmax<cudaStream_t, kRun>), (CudaPlanOf<SoftmaxCallOf<false>>),
               ReduceStrategies());
JB_CUDA_TARGET("segment_softmax_backward", (HandleSoftmaxBackward<cudaStream_t, kRun>),
               (CudaPlanOf<SoftmaxCallOf<true>>), TileStrategies());

}  // namespace
}  // namespace jax_baracuda::segment
