// The CUDA targets of segment_sum and segment_mean.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/sum/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<SumCall>;

JB_CUDA_TARGET(SumCall::kSumName, (HandleSum<cudaStream_t, SumCall, kRun, /*kIsMean=*/false>),
               (CudaPlanOf<SumCallOf<SumCall, false>>), ReduceStrategies(Strategy::kAtomics, Strategy::kSharedTable));
JB_CUDA_TARGET(SumCall::kMeanName, (HandleSum<cudaStream_t, SumCall, kRun, /*kIsMean=*/true>),
               (CudaPlanOf<SumCallOf<SumCall, true>>),
               ReduceStrategies(Strategy::kFillCounts, Strategy::kAtomics, Strategy::kSharedTable));

}  // namespace
}  // namespace jax_baracuda::segment
