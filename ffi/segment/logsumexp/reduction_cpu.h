// The CPU reduction of segment_logsumexp, which softmax runs too.
#pragma once

#include "ffi/core/function_ref.h"
#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/logsumexp/logsumexp.h"

namespace jax_baracuda::segment {

// Calls body(reduction) with the reduction of a call, and returns its result.
bool WithLogSumExp(const LogSumExpCall& call, FunctionRef<bool(const RowReduction&)> body);

}  // namespace jax_baracuda::segment
