// The CUDA handlers of write_slice and its gradient.

#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"
#include "ffi/write_slice/write_slice.cuh"
#include "ffi/write_slice/write_slice_handler.h"

namespace jax_baracuda::write_slice {
namespace {

template <CudaStatus (*kLaunch)(const Call&, cudaStream_t)>
ffi::Error Run(cudaStream_t stream, const char* op, const Call& call) {
  return ToError(op, kLaunch(call, stream));
}

JB_TARGET("write_slice", (HandleWindows<cudaStream_t, true, Run<LaunchWrite>>), PlanWindows, JB_NAMES(kStrategyNames));
JB_TARGET("write_slice_backward", (HandleWindows<cudaStream_t, false, Run<LaunchTake>>), PlanWindows, kStrategyNames,
          kStrategyNames + kTakeStrategies);

}  // namespace
}  // namespace jax_baracuda::write_slice
