// The CUDA targets of segment_softmax and its gradient.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/softmax/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<SoftmaxCall>;

#define JB_SOFTMAX_STRATEGIES                                                                                  \
  kNothing, "fill", "one_launch", "tiles", "sort_then_tiles", "atomics", "cached_atomics", "atomics_in_parts", \
      "cached_atomics_in_parts"

JB_CUDA_TARGET("segment_softmax", (HandleSoftmax<cudaStream_t, kRun>), (BindCall<Stream, 2, 1, SoftmaxOptions>()),
               (CudaPlanOf<SoftmaxCallOf<false>>), JB_SOFTMAX_STRATEGIES);
JB_CUDA_TARGET("segment_softmax_backward", (HandleSoftmaxBackward<cudaStream_t, kRun>),
               (BindCall<Stream, 3, 1, SoftmaxOptions>()), (CudaPlanOf<SoftmaxCallOf<true>>), JB_SOFTMAX_STRATEGIES);

}  // namespace
}  // namespace jax_baracuda::segment
