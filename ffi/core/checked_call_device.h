// The parts of CheckedCall that differ between CPUs and GPUs, and the error that both make.
#pragma once

#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace jax_baracuda {

// Allocates nothing here: there may be no memory.
XLA_FFI_Error* MakeError(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* message);

// Before a handler is executed.
void ForgetStaleErrors();

// Sets memory of the device to bytes 0xFF, in the order of the call's other work.
XLA_FFI_Error* FillWithOnes(XLA_FFI_CallFrame* frame, void* data, int64_t bytes);

}  // namespace jax_baracuda
