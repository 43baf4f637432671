// How handlers run decoded calls on the back end of their module: every handler.cc is compiled for both.
#pragma once

#include <type_traits>

#include "ffi/core/target_table.h"
#include "ffi/segment/decoding.h"
#ifdef JB_CUDA
#include "ffi/core/cuda_handler.h"
#else
#include "ffi/core/cpu_kernel.h"
#endif

namespace jax_baracuda::segment {

// What XLA passes to a handler first: the stream or the thread pool.
using Context = std::remove_reference_t<Executor>;

#ifdef JB_CUDA

inline constexpr bool kOnCuda = true;

// Decodes the scratch, which follows the results, and launches the kernels. The launch plans the call, and fails if its
// scratch is too small.
template <typename Call>
ffi::Error RunCall(Context stream, const OptionalResults& results, Call* call) {
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(results, /*needed_bytes=*/0, &scratch));
  call->scratch = scratch.data;
  call->scratch_bytes = scratch.bytes;
  const CudaStatus status = call->Run(stream);
  if (!status.ok()) JB_RETURN_IF_ERROR(CheckScratch(results.op(), scratch, call->MakePlan().scratch_bytes));
  return ToError(results.op(), status);
}

#else

inline constexpr bool kOnCuda = false;

template <typename Call>
ffi::Error RunCall(Context pool, const OptionalResults& results, Call* call) {
  JB_RETURN_IF_ERROR(results.End());
  return MemoryStatus(results.op(), call->Run(pool));
}

#endif

// The plan of the call that kCallOf makes of plan parameters.
template <auto kCallOf>
Plan PlanOf(const PlanParameters& parameters) {
  return kCallOf(parameters).MakePlan();
}

}  // namespace jax_baracuda::segment
