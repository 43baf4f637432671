// The CUDA targets of attention over edges and its gradients.

#include "ffi/segment/attention/handler.h"
#include "ffi/segment/engine/run_cuda.h"

namespace jax_baracuda::segment {
namespace {

constexpr ScoreKind kDot = ScoreKind::kDotProduct, kAdditive = ScoreKind::kAdditive, kGiven = ScoreKind::kGiven;
constexpr auto kRun = RunSortedOnCuda<AttentionForwardCall>;
constexpr auto kRunBySegment = RunSortedOnCuda<AttentionBySegmentCall>;
constexpr auto kRunByRow = RunSortedOnCuda<AttentionByRowCall>;

constexpr auto kPlan = CudaPlanOf<AttentionCallOf<AttentionForwardCall>>;
constexpr auto kPlanBySegment = CudaPlanOf<AttentionCallOf<AttentionBySegmentCall>>;
constexpr auto kPlanByRow = CudaPlanOf<AttentionCallOf<AttentionByRowCall>>;

JB_CUDA_TARGET(kForwardName<kDot>, (HandleAttention<cudaStream_t, kDot, kRun>), kPlan, EdgeStrategies());
JB_CUDA_TARGET(kForwardName<kAdditive>, (HandleAttention<cudaStream_t, kAdditive, kRun>), kPlan, EdgeStrategies());
JB_CUDA_TARGET(kForwardName<kGiven>, (HandleAttention<cudaStream_t, kGiven, kRun>), kPlan, EdgeStrategies());
JB_CUDA_TARGET(kBySegmentName<kDot>, (HandleAttentionBySegment<cudaStream_t, kDot, kRunBySegment>), kPlanBySegment,
               EdgeStrategies());
JB_CUDA_TARGET(kBySegmentName<kAdditive>, (HandleAttentionBySegment<cudaStream_t, kAdditive, kRunBySegment>),
               kPlanBySegment, EdgeStrategies());
JB_CUDA_TARGET(kByRowName<kDot>, (HandleAttentionByRow<cudaStream_t, kDot, kRunByRow>), kPlanByRow, EdgeStrategies());
JB_CUDA_TARGET(kByRowName<kAdditive>, (HandleAttentionByRow<cudaStream_t, kAdditive, kRunByRow>), kPlanByRow,
               EdgeStrategies());
JB_CUDA_TARGET(kByRowName<kGiven>, (HandleAttentionByRow<cudaStream_t, kGiven, kRunByRow>), kPlanByRow,
               EdgeStrategies());

}  // namespace
}  // namespace jax_baracuda::segment
