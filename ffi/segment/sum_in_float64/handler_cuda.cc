// The CUDA targets of segment_sum_in_float64 and segment_mean_in_float64.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/sum/handler.h"
#include "ffi/segment/sum_in_float64/call.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<Float64SumCall>;

JB_CUDA_TARGET(Float64SumCall::kSumName, (HandleSum<cudaStream_t, Float64SumCall, kRun, /*kIsMean=*/false>),
               (CudaPlanOf<SumCallOf<Float64SumCall, false>>), TileStrategies());
JB_CUDA_TARGET(Float64SumCall::kMeanName, (HandleSum<cudaStream_t, Float64SumCall, kRun, /*kIsMean=*/true>),
               (CudaPlanOf<SumCallOf<Float64SumCall, true>>), TileStrategies(Strategy::kFillCounts));

}  // namespace
}  // namespace jax_baracuda::segment
