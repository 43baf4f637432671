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

std::vector<const char*> ExtremumStrategies() {
  return ReduceStrategies(Strategy::kAtomics, Strategy::kFilteredAtomics, Strategy::kSharedTable);
}

// There are no private tables; the shared table replaces them.
std::vector<const char*> WithWinnerStrategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kFill, Strategy::kBatchOfFewRows,
                 Strategy::kFewUnsortedRows, Strategy::kFewSortedRows, Strategy::kRuns, Strategy::kTiles,
                 Strategy::kStagedTiles, Strategy::kSortThenTiles, Strategy::kAtomics, Strategy::kFilteredAtomics,
                 Strategy::kSharedTable);
}

JB_CUDA_TARGET("segment_max", (HandleExtremum<cudaStream_t, kRun, false, /*kWithWinner=*/false>), kPlan,
               ExtremumStrategies());
JB_CUDA_TARGET("segment_min", (HandleExtremum<cudaStream_t, kRun, true, /*kWithWinner=*/false>), kPlan,
               ExtremumStrategies());
JB_CUDA_TARGET("segment_max_with_winner", (HandleExtremum<cudaStream_t, kRun, false, /*kWithWinner=*/true>),
               kPlanWithWinner, WithWinnerStrategies());
JB_CUDA_TARGET("segment_min_with_winner", (HandleExtremum<cudaStream_t, kRun, true, /*kWithWinner=*/true>),
               kPlanWithWinner, WithWinnerStrategies());
JB_CUDA_TARGET("segment_max_backward", (HandleExtremumBackward<cudaStream_t, kRunBackward, false>), kPlanBackward,
               JB_NAMES(kMapStrategyNames));
JB_CUDA_TARGET("segment_min_backward", (HandleExtremumBackward<cudaStream_t, kRunBackward, true>), kPlanBackward,
               JB_NAMES(kMapStrategyNames));
JB_CUDA_TARGET("segment_argmax", (HandleArg<cudaStream_t, kRunArg, false>), kPlanArg, ReduceStrategies());
JB_CUDA_TARGET("segment_argmin", (HandleArg<cudaStream_t, kRunArg, true>), kPlanArg, ReduceStrategies());

}  // namespace
}  // namespace jax_baracuda::segment
