// The CUDA targets of segment_prod and its gradient.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/product/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr auto kRun = RunOnCuda<ProductCall>;
constexpr auto kRunBackward = RunOnCuda<ProductBackwardCall>;
constexpr auto kPlan = CudaPlanOf<CallOf<ProductCall>>;

JB_CUDA_TARGET("segment_prod", (HandleProduct<cudaStream_t, kRun, /*kHasResidual=*/false>), kPlan, ReduceStrategies());
JB_CUDA_TARGET("segment_prod_with_residual", (HandleProduct<cudaStream_t, kRun, /*kHasResidual=*/true>), kPlan,
               ReduceStrategies());
JB_CUDA_TARGET("segment_prod_backward", (HandleProductBackward<cudaStream_t, kRunBackward>),
               (CudaPlanOf<CallOf<ProductBackwardCall>>), JB_NAMES(kMapStrategyNames));

}  // namespace
}  // namespace jax_baracuda::segment
