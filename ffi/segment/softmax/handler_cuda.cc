// The CUDA targets of segment_softmax and its gradient.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/softmax/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<SoftmaxCall>;

JB_CUDA_TARGET("segment_softmax", (HandleSoftmax<cudaStream_t, kRun>), (CudaPlanOf<SoftmaxCallOf<false>>), kNothing,
               JB_REDUCE_STRATEGIES);
JB_CUDA_TARGET("segment_softmax_backward", (HandleSoftmaxBackward<cudaStream_t, kRun>),
               (CudaPlanOf<SoftmaxCallOf<true>>), kNothing, "fill", "tiles", "staged_tiles", "few_unsorted_rows",
               "sort_then_tiles");

}  // namespace
}  // namespace jax_baracuda::segment
