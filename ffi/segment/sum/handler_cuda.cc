// The CUDA targets of segment_sum and segment_mean.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/sum/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<SumCall>;

JB_CUDA_TARGET(SumCall::kSumName, (HandleSum<cudaStream_t, SumCall, kRun, /*kIsMean=*/false>),
               (CudaPlanOf<SumCallOf<SumCall, false>>), kNothing, JB_REDUCE_STRATEGIES, "atomics", "shared_table");
JB_CUDA_TARGET(SumCall::kMeanName, (HandleSum<cudaStream_t, SumCall, kRun, /*kIsMean=*/true>),
               (CudaPlanOf<SumCallOf<SumCall, true>>), kNothing, "fill_counts", JB_REDUCE_STRATEGIES, "atomics",
               "shared_table");

}  // namespace
}  // namespace jax_baracuda::segment
