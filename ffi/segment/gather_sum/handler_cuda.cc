// The CUDA target of gather_segment_sum.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/gather_sum/handler.h"

namespace jax_baracuda::segment {
namespace {

JB_CUDA_TARGET("gather_segment_sum", (HandleGatherSum<cudaStream_t, RunSortedOnCuda<GatherSumCall>>),
               (CudaPlanOf<GatherSumCallOf>), EdgeStrategies());

}  // namespace
}  // namespace jax_baracuda::segment
