// The wrapper around every handler that XLA executes.
//
// If the environment variable JAX_BARACUDA_POISON is "1", it fills all results, including scratch memory, with 0xFF
// before the handler runs, so that tests notice elements that no kernel wrote. Results that alias an operand are not
// filled.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_baracuda {

// Calls the handler and turns exceptions into errors: none may cross XLA's C interface.
XLA_FFI_Error* CheckedCall(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame);

template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* CheckedHandler(XLA_FFI_CallFrame* frame) {
  return CheckedCall(kHandler, frame);
}

}  // namespace jax_baracuda
