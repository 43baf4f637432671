#include "ffi/core/checked_call.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "ffi/core/bit_width.h"
#include "ffi/core/thread_sanitizer.h"
#ifdef JB_CUDA
#include <cuda_runtime_api.h>

#include "ffi/core/cuda_error_text.h"
#include "ffi/core/cuda_status.h"
#endif

namespace jax_baracuda {
namespace {

// Does not allocate in this module: memory may be exhausted.
XLA_FFI_Error* MakeError(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* message) {
  char text[1024];
  std::snprintf(text, sizeof(text), "jax_baracuda: %s", message);
  XLA_FFI_Error_Create_Args error{};
  error.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  error.message = text;
  error.errc = code;
  return frame->api->XLA_FFI_Error_Create(&error);
}

#ifdef JB_CUDA

// Clears errors of earlier CUDA calls in this thread. Otherwise the check after our first launch would report them.
void ForgetStaleErrors() { cudaGetLastError(); }

// Ordered on the call's stream.
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

#else

void ForgetStaleErrors() {}

XLA_FFI_Error* FillWithOnes(XLA_FFI_CallFrame*, void* data, int64_t bytes) {
  std::memset(data, 0xFF, bytes);
  return nullptr;
}

#endif

bool PoisonsResults() {
  static const bool poisons = [] {
    const char* value = std::getenv("JAX_BARACUDA_POISON");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return poisons;
}

int64_t SizeInBytes(const XLA_FFI_Buffer& buffer) {
  int64_t elements = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) elements *= buffer.dims[i];
  return PackedBytes(elements, BitWidth(static_cast<xla::ffi::DataType>(buffer.dtype)));
}

bool IsMemoryOfOperand(const XLA_FFI_CallFrame* frame, const void* data) {
  for (int64_t i = 0; i < frame->args.size; ++i) {
    if (frame->args.types[i] == XLA_FFI_ArgType_BUFFER &&
        static_cast<const XLA_FFI_Buffer*>(frame->args.args[i])->data == data) {
      return true;
    }
  }
  return false;
}

XLA_FFI_Error* PoisonResults(XLA_FFI_CallFrame* frame) {
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    if (frame->rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
    const int64_t bytes = SizeInBytes(buffer);
    if (bytes == 0 || IsMemoryOfOperand(frame, buffer.data)) continue;
    if (XLA_FFI_Error* error = FillWithOnes(frame, buffer.data, bytes)) return error;
  }
  return nullptr;
}

XLA_FFI_Error* CallOrThrow(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  const ScopedHandler running;
  // XLA queries a handler's metadata by calls of other stages.
  if (frame->stage == XLA_FFI_ExecutionStage_EXECUTE) {
    ForgetStaleErrors();
    if (PoisonsResults()) {
      if (XLA_FFI_Error* error = PoisonResults(frame)) return error;
    }
  }
  return handler(frame);
}

}  // namespace

XLA_FFI_Error* CheckedCall(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  try {
    return CallOrThrow(handler, frame);
  } catch (const std::bad_alloc&) {
    return MakeError(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "out of host memory");
  } catch (const std::exception& error) {
    return MakeError(frame, XLA_FFI_Error_Code_INTERNAL, error.what());
  } catch (...) {
    return MakeError(frame, XLA_FFI_Error_Code_INTERNAL, "a handler threw what is no std::exception");
  }
}

}  // namespace jax_baracuda
