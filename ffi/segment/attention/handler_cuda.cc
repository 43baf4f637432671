// The CUDA targets of graph_attention and its gradients.

#include "ffi/segment/attention/handler.h"
#include "ffi/segment/engine/run_cuda.h"

namespace jax_baracuda::segment {
namespace {

template <typename Call>
ffi::Error RunAttention(cudaStream_t stream, const char* op, ffi::RemainingRets results, Call* call, size_t first) {
  JB_RETURN_IF_ERROR(CheckSorted(op, *call));
  return RunWithResults(stream, op, results, call, first);
}

JB_CUDA_TARGET("graph_attention", (HandleAttention<cudaStream_t, RunAttention<AttentionForwardCall>>),
               BindAttention<Stream>(), (CudaPlanOf<AttentionCallOf<AttentionForwardCall>>), kNothing, "fill", "tiles");

JB_CUDA_TARGET("graph_attention_backward_by_segment",
               (HandleAttentionBySegment<cudaStream_t, RunAttention<AttentionBySegmentCall>>),
               BindAttentionBackward<Stream>(), (CudaPlanOf<AttentionCallOf<AttentionBySegmentCall>>), kNothing, "fill",
               "tiles");

JB_CUDA_TARGET("graph_attention_backward_by_row",
               (HandleAttentionByRow<cudaStream_t, RunAttention<AttentionByRowCall>>), BindAttentionBackward<Stream>(),
               (CudaPlanOf<AttentionCallOf<AttentionByRowCall>>), kNothing, "fill", "tiles");

}  // namespace
}  // namespace jax_baracuda::segment
