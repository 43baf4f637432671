// The functions of CheckedCall that differ between CPU and GPU, and the error that both create.
#pragma once

#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace jax_baracuda {

// Does not allocate in this module: memory may be exhausted.
XLA_FFI_Error* MakeError(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* message);

// Called before a handler is executed.
void ForgetStaleErrors();

// Fills device memory with 0xFF bytes, ordered on the call's stream.
XLA_FFI_Error* FillWithOnes(XLA_FFI_CallFrame* frame, void* data, int64_t bytes);

}  // namespace jax_baracuda
