// The CUDA targets of gather_segment_max, gather_segment_min and their gradients.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/gather_extremum/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunSortedOnCuda<GatherExtremumCall>;
constexpr auto kRunBackward = RunSortedOnCuda<GatherExtremumBackwardCall>;
constexpr auto kPlan = CudaPlanOf<GatherExtremumCallOf<false>>;
constexpr auto kPlanWithWinner = CudaPlanOf<GatherExtremumCallOf<true>>;
constexpr auto kPlanBackward = CudaPlanOf<GatherExtremumBackwardCallOf>;

JB_CUDA_TARGET("gather_segment_max", (HandleGatherExtremum<cudaStream_t, kRun, false, /*kWithWinner=*/false>), kPlan,
               EdgeStrategies());
JB_CUDA_TARGET("gather_segment_min", (HandleGatherExtremum<cudaStream_t, kRun, true, /*kWithWinner=*/false>), kPlan,
               EdgeStrategies());
JB_CUDA_TARGET("gather_segment_max_with_winner",
               (HandleGatherExtremum<cudaStream_t, kRun, false, /*kWithWinner=*/true>), kPlanWithWinner,
               EdgeStrategies());
JB_CUDA_TARGET("gather_segment_min_with_winner", (HandleGatherExtremum<cudaStream_t, kRun, true, /*kWithWinner=*/true>),
               kPlanWithWinner, EdgeStrategies());
JB_CUDA_TARGET("gather_segment_max_backward", (HandleGatherExtremumBackward<cudaStream_t, kRunBackward, false>),
               kPlanBackward, EdgeStrategies());
JB_CUDA_TARGET("gather_segment_min_backward", (HandleGatherExtremumBackward<cudaStream_t, kRunBackward, true>),
               kPlanBackward, EdgeStrategies());

}  // namespace
}  // namespace jax_baracuda::segment
