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

#define JB_BIND_EXTREMUM (BindCall<Stream, 3, 1, ReductionOptions>())
#define JB_STRATEGIES kNothing, "fill", "tiles", "small_tiles"

JB_CUDA_TARGET("gather_segment_max", (HandleGatherExtremum<cudaStream_t, kRun, false>), JB_BIND_EXTREMUM, kPlan,
               JB_STRATEGIES);
JB_CUDA_TARGET("gather_segment_min", (HandleGatherExtremum<cudaStream_t, kRun, true>), JB_BIND_EXTREMUM, kPlan,
               JB_STRATEGIES);
JB_CUDA_TARGET("gather_segment_max_with_winner", (HandleGatherExtremumWithWinner<cudaStream_t, kRun, false>),
               BindGatherExtremumWithWinner<Stream>(), kPlanWithWinner, JB_STRATEGIES);
JB_CUDA_TARGET("gather_segment_min_with_winner", (HandleGatherExtremumWithWinner<cudaStream_t, kRun, true>),
               BindGatherExtremumWithWinner<Stream>(), kPlanWithWinner, JB_STRATEGIES);
JB_CUDA_TARGET("gather_segment_max_backward", (HandleGatherExtremumBackward<cudaStream_t, kRunBackward, false>),
               BindGatherExtremumBackward<Stream>(), kPlanBackward, JB_STRATEGIES);
JB_CUDA_TARGET("gather_segment_min_backward", (HandleGatherExtremumBackward<cudaStream_t, kRunBackward, true>),
               BindGatherExtremumBackward<Stream>(), kPlanBackward, JB_STRATEGIES);

}  // namespace
}  // namespace jax_baracuda::segment
