#include <cuda_runtime_api.h>

#include "ffi/core/checked_call_device.h"
#include "ffi/core/cuda_error_text.h"

namespace jax_baracuda {

// Clears errors of earlier CUDA calls in this thread. Otherwise the check after our first launch would report them.
void ForgetStaleErrors() { cudaGetLastError(); }

XLA_FFI_Error* FillWithOnes(XLA_FFI_CallFrame* frame, void* data, int64_t bytes) {
  XLA_FFI_Stream_Get_Args stream{};
  stream.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  stream.ctx = frame->ctx;
  if (XLA_FFI_Error* error = frame->api->XLA_FFI_Stream_Get(&stream)) return error;
  const CudaStatus status =
      JB_CUDA_STATUS(cudaMemsetAsync(data, 0xFF, bytes, static_cast<cudaStream_t>(stream.stream)));
  if (status.ok()) return nullptr;
  return MakeError(frame, XLA_FFI_Error_Code_INTERNAL, CudaErrorText(status).c_str());
}

}  // namespace jax_baracuda
