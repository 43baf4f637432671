// The CUDA target of segment_logsumexp.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/logsumexp/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<LogSumExpCall>;

JB_CUDA_TARGET("segment_logsumexp", (HandleLogSumExp<cudaStream_t, kRun>), (CudaPlanOf<CallOf<LogSumExpCall>>),
               ReduceStrategies());

}  // namespace
}  // namespace jax_baracuda::segment
