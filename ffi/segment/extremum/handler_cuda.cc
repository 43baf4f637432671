// The CUDA targets of segment_max, segment_min, segment_argmax, segment_argmin and the gradients.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/extremum/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<ExtremumCall>;
constexpr auto kRunBackward = RunOnCuda<ExtremumBackwardCall>;
constexpr auto kRunArg = RunOnCuda<ArgCall>;

constexpr auto kPlan = CudaPlanOf<ExtremumCallOf<false>>;
constexpr auto kPlanWithWinner = CudaPlanOf<ExtremumCallOf<true>>;
constexpr auto kPlanBackward = CudaPlanOf<CallOf<ExtremumBackwardCall>>;
constexpr auto kPlanArg = CudaPlanOf<CallOf<ArgCall>>;

#define JB_TABLE_STRATEGIES "shared_table", "filtered_atomics", "atomics"
// With winners there are no private tables; the shared table replaces them.
#define JB_WITH_WINNER_STRATEGIES                                                                                 \
  kNothing, "fill", "batch_of_few_rows", "few_unsorted_rows", "few_sorted_rows", "runs", "tiles", "staged_tiles", \
      "sort_then_tiles", JB_TABLE_STRATEGIES

JB_CUDA_TARGET("segment_max", (HandleExtremum<cudaStream_t, kRun, false, /*kWithWinner=*/false>), kPlan, kNothing,
               JB_REDUCE_STRATEGIES, JB_TABLE_STRATEGIES);
JB_CUDA_TARGET("segment_min", (HandleExtremum<cudaStream_t, kRun, true, /*kWithWinner=*/false>), kPlan, kNothing,
               JB_REDUCE_STRATEGIES, JB_TABLE_STRATEGIES);
JB_CUDA_TARGET("segment_max_with_winner", (HandleExtremum<cudaStream_t, kRun, false, /*kWithWinner=*/true>),
               kPlanWithWinner, JB_WITH_WINNER_STRATEGIES);
JB_CUDA_TARGET("segment_min_with_winner", (HandleExtremum<cudaStream_t, kRun, true, /*kWithWinner=*/true>),
               kPlanWithWinner, JB_WITH_WINNER_STRATEGIES);
JB_CUDA_TARGET("segment_max_backward", (HandleExtremumBackward<cudaStream_t, kRunBackward, false>), kPlanBackward,
               kNothing, JB_MAP_ROWS_STRATEGIES);
JB_CUDA_TARGET("segment_min_backward", (HandleExtremumBackward<cudaStream_t, kRunBackward, true>), kPlanBackward,
               kNothing, JB_MAP_ROWS_STRATEGIES);
JB_CUDA_TARGET("segment_argmax", (HandleArg<cudaStream_t, kRunArg, false>), kPlanArg, kNothing, JB_REDUCE_STRATEGIES);
JB_CUDA_TARGET("segment_argmin", (HandleArg<cudaStream_t, kRunArg, true>), kPlanArg, kNothing, JB_REDUCE_STRATEGIES);

}  // namespace
}  // namespace jax_baracuda::segment
