// What XLA calls to run a handler.
//
// If the environment variable JAX_BARACUDA_POISON is "1", it fills all results, including scratch memory, with 0xFF
// before the handler runs, so that tests notice elements that no kernel wrote. Results that alias an operand are not
// filled.
#pragma once

#include "ffi/core/arguments.h"
#include "xla/ffi/api/c_api.h"

namespace jax_baracuda {

// Decodes a call and runs it. Throws an error if the call is wrong.
using Handler = void(Arguments& arguments);

// Calls the handler and turns exceptions into errors that name the op: none may cross XLA's C interface.
XLA_FFI_Error* CheckedCall(const char* op, Handler* handler, XLA_FFI_CallFrame* frame);

}  // namespace jax_baracuda
