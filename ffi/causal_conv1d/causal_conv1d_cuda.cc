// The CUDA handlers of causal_conv1d, its gradient and its update.

#include <cstdint>

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/causal_conv1d_handler.h"
#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"

namespace jax_baracuda::causal_conv1d {
namespace {

ffi::Error Forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::RemainingArgs optional_operands,
                   ffi::Result<ffi::AnyBuffer> y, bool channels_last, bool silu, bool has_bias, bool has_initial_state,
                   bool has_taps) {
  constexpr const char* kOp = "causal_conv1d";
  ForwardCall call;
  JB_RETURN_IF_ERROR(DecodeForward(kOp, x, weight, optional_operands, *y, channels_last, silu, has_bias,
                                   has_initial_state, has_taps, &call));
  return CudaStatus(kOp, LaunchForward(call, stream));
}

ffi::Error Backward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer dy,
                    ffi::RemainingArgs optional_operands, ffi::Result<ffi::AnyBuffer> dx,
                    ffi::Result<ffi::AnyBuffer> dweight, ffi::Result<ffi::AnyBuffer> dbias,
                    ffi::RemainingRets more_results, bool channels_last, bool silu, bool has_bias,
                    bool has_initial_state, bool has_taps, bool has_d_final_state) {
  constexpr const char* kOp = "causal_conv1d_backward";
  BackwardCall call;
  size_t num_results;
  JB_RETURN_IF_ERROR(DecodeBackward(kOp, x, weight, dy, optional_operands, *dx, *dweight, *dbias, more_results,
                                    channels_last, silu, has_bias, has_initial_state, has_taps, has_d_final_state,
                                    &call, &num_results));
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(
      DecodeScratch(kOp, more_results,
                    BackwardScratchBytes(call.problem, static_cast<int64_t>(ffi::ByteWidth(dx->element_type()))),
                    &scratch, /*first=*/num_results));
  call.scratch = scratch.data;
  call.scratch_bytes = scratch.bytes;
  return CudaStatus(kOp, LaunchBackward(call, stream));
}

ffi::Error Update(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer state, ffi::AnyBuffer weight,
                  ffi::RemainingArgs optional_operands, ffi::Result<ffi::AnyBuffer> y,
                  ffi::Result<ffi::AnyBuffer> new_state, bool channels_last, bool silu, bool has_bias) {
  constexpr const char* kOp = "causal_conv1d_update";
  UpdateCall call;
  JB_RETURN_IF_ERROR(
      DecodeUpdate(kOp, x, state, weight, optional_operands, *y, *new_state, channels_last, silu, has_bias, &call));
  return CudaStatus(kOp, LaunchUpdate(call, stream));
}

XLA_FFI_DEFINE_HANDLER(kForward, Forward, BindForward<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackward, Backward, BindBackward<Stream>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kUpdate, Update, BindUpdate<Stream>(), {ffi::Traits::kCmdBufferCompatible});

int64_t ScratchOfBackward(const ScratchParameters& parameters) {
  Problem problem{};
  problem.batch = parameters.at("batch");
  problem.examples = parameters.at("examples");
  problem.channels = parameters.at("channels");
  problem.length = parameters.at("length");
  problem.width = static_cast<int>(parameters.at("width"));
  problem.channels_last = parameters.at("channels_last") != 0;
  return BackwardScratchBytes(problem, parameters.at("element_bytes"));
}

JB_REGISTER_TARGET("causal_conv1d", kForward, nullptr);
JB_REGISTER_TARGET("causal_conv1d_backward", kBackward, ScratchOfBackward);
JB_REGISTER_TARGET("causal_conv1d_update", kUpdate, nullptr);

}  // namespace
}  // namespace jax_baracuda::causal_conv1d
