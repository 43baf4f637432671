// The CUDA targets of the gradients of segment_sum and segment_mean.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/gather/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<GatherCall>;
constexpr auto kPlan = CudaPlanOf<CallOf<GatherCall>>;

JB_CUDA_TARGET("segment_sum_backward", (HandleSumBackward<cudaStream_t, kRun>), kPlan, JB_NAMES(kMapStrategyNames));
JB_CUDA_TARGET("segment_mean_backward", (HandleMeanBackward<cudaStream_t, kRun>), kPlan, JB_NAMES(kMapStrategyNames));

}  // namespace
}  // namespace jax_baracuda::segment
