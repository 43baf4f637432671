// The CUDA targets of segment_sum and segment_mean, also of those that accumulate in float64.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/sum/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<SumCall>;

JB_CUDA_TARGET((kSumName<false, false>), (HandleSum<cudaStream_t, kRun, /*kIsMean=*/false, /*kInFloat64=*/false>),
               (CudaPlanOf<SumCallOf<false, false>>), ReduceStrategies(Strategy::kAtomics, Strategy::kSharedTable));
JB_CUDA_TARGET((kSumName<true, false>), (HandleSum<cudaStream_t, kRun, /*kIsMean=*/true, /*kInFloat64=*/false>),
               (CudaPlanOf<SumCallOf<true, false>>),
               ReduceStrategies(Strategy::kFillCounts, Strategy::kAtomics, Strategy::kSharedTable));
JB_CUDA_TARGET((kSumName<false, true>), (HandleSum<cudaStream_t, kRun, /*kIsMean=*/false, /*kInFloat64=*/true>),
               (CudaPlanOf<SumCallOf<false, true>>), TileStrategies());
JB_CUDA_TARGET((kSumName<true, true>), (HandleSum<cudaStream_t, kRun, /*kIsMean=*/true, /*kInFloat64=*/true>),
               (CudaPlanOf<SumCallOf<true, true>>), TileStrategies(Strategy::kFillCounts));

}  // namespace
}  // namespace jax_baracuda::segment
