// The CUDA handlers of write_slice and its gradient.

#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"
#include "ffi/write_slice/write_slice.cuh"
#include "ffi/write_slice/write_slice_handler.h"

namespace jax_baracuda::write_slice {
namespace {

CudaStatus CopyArrays(const std::vector<Copy>& copies, cudaStream_t stream) {
  for (const Copy& copy : copies) {
    const size_t bytes = static_cast<size_t>(copy.bytes);
    JB_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(copy.to, copy.from, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  return {};
}

ffi::Error Write(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Span<const int64_t> windows, bool drop, int64_t num_batch_dims) {
  constexpr const char* kOp = "write_slice";
  Call call;
  JB_RETURN_IF_ERROR(Decoder(kOp, operands, results, windows, drop, num_batch_dims).DecodeWrite(&call));
  JB_RETURN_IF_ERROR(ToError(kOp, CopyArrays(call.copies, stream)));
  return ToError(kOp, LaunchWrite(call.updates, stream));
}

ffi::Error Take(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                ffi::Span<const int64_t> windows, bool drop, int64_t num_batch_dims) {
  constexpr const char* kOp = "write_slice_backward";
  Call call;
  JB_RETURN_IF_ERROR(Decoder(kOp, operands, results, windows, drop, num_batch_dims).DecodeTake(&call));
  JB_RETURN_IF_ERROR(ToError(kOp, CopyArrays(call.copies, stream)));
  return ToError(kOp, LaunchTake(call.updates, stream));
}

JB_CUDA_TARGET("write_slice", Write, BindWindows<Stream>(), PlanWindows, JB_NAMES(kStrategyNames));
JB_CUDA_TARGET("write_slice_backward", Take, BindWindows<Stream>(), PlanWindows, kStrategyNames,
               kStrategyNames + kTakeStrategies);

}  // namespace
}  // namespace jax_baracuda::write_slice
