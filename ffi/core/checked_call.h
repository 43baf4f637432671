// What happens around every handler when XLA executes it, whatever the op.
//
// If the environment variable JAX_BARACUDA_POISON is "1", all results, scratch memory included, are filled with 0xFF
// before the handler runs: a test then sees an element that no kernel wrote. Results in the memory of an operand are
// left alone.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_baracuda {

// Calls the handler. What it throws becomes an error: no exception may reach XLA's C interface.
XLA_FFI_Error* CheckedCall(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame);

template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* CheckedHandler(XLA_FFI_CallFrame* frame) {
  return CheckedCall(kHandler, frame);
}

}  // namespace jax_baracuda
