// The CUDA handlers of causal_conv1d, its gradient and its update.

#include <cstdint>

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/causal_conv1d_handler.h"
#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"

namespace jax_baracuda::causal_conv1d {
namespace {

ffi::Error Forward(cudaStream_t stream, const ForwardCall& call) {
  return CudaStatus(kForwardName, LaunchForward(call, stream));
}

ffi::Error Backward(cudaStream_t stream, BackwardCall* call, ffi::RemainingRets more_results, size_t num_decoded) {
  const int64_t scratch_bytes = BackwardScratchBytes(call->problem, ElementBytes(call->type));
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(kBackwardName, more_results, scratch_bytes, &scratch, /*first=*/num_decoded));
  call->scratch = scratch.data;
  return CudaStatus(kBackwardName, LaunchBackward(*call, stream));
}

ffi::Error Update(cudaStream_t stream, const UpdateCall& call) {
  return CudaStatus(kUpdateName, LaunchUpdate(call, stream));
}

XLA_FFI_DEFINE_HANDLER(kForward, (HandleForward<cudaStream_t, Forward>), BindForward<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackward, (HandleBackward<cudaStream_t, Backward>), BindBackward<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kUpdate, (HandleUpdate<cudaStream_t, Update>), BindUpdate<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});

int64_t ScratchOfBackward(const ScratchParameters& parameters) {
  Problem problem{};
  problem.batch = parameters.at("batch");
  problem.examples = parameters.at("examples");
  problem.channels = parameters.at("channels");
  problem.length = parameters.at("length");
  problem.width = static_cast<int>(parameters.at("width"));
  problem.channels_last = parameters.at("channels_last") != 0;
  problem.has_taps = parameters.at("has_taps") != 0;
  return BackwardScratchBytes(problem, parameters.at("element_bytes"));
}

JB_REGISTER_TARGET(kForwardName, kForward, nullptr);
JB_REGISTER_TARGET(kBackwardName, kBackward, ScratchOfBackward);
JB_REGISTER_TARGET(kUpdateName, kUpdate, nullptr);

}  // namespace
}  // namespace jax_baracuda::causal_conv1d
