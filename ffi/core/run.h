// How handlers run decoded calls on the back end of their module: every handler.cc is compiled for both.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/core/arguments.h"
#include "ffi/core/target_table.h"
#ifdef JB_CUDA
#include <stdexcept>

#include "ffi/core/cuda_error_text.h"
#include "ffi/core/cuda_status.h"
#else
#include <new>
#endif

namespace jax_baracuda {

#ifdef JB_CUDA

inline constexpr bool kOnCuda = true;

inline void CheckStatus(const CudaStatus& status) {
  if (!status.ok()) throw std::runtime_error(CudaErrorText(status));
}

// Runs a call with a scratch buffer, an optional last result: calls that need no scratch omit it. Run plans the call,
// and fails if its scratch is too small.
template <typename Call>
void RunWithScratch(Arguments& arguments, Call* call) {
  if (arguments.NumResultsLeft() > 0) {
    const Buffer scratch = arguments.Result("scratch");
    scratch.CheckType(XLA_FFI_DataType_U8);
    call->scratch = scratch.data;
    call->scratch_bytes = scratch.Size();
  }
  arguments.CheckEnd();
  const CudaStatus status = call->Run(arguments.executor());
  if (status.ok()) return;
  const int64_t needed_bytes = call->MakePlan().scratch_bytes;
  if (call->scratch_bytes < needed_bytes) {
    throw InvalidArgument("scratch has " + std::to_string(call->scratch_bytes) + " bytes, expected " +
                          std::to_string(needed_bytes));
  }
  CheckStatus(status);
}

#else

inline constexpr bool kOnCuda = false;

inline void CheckStatus(RunStatus has_memory) {
  if (!has_memory) throw std::bad_alloc();
}

// CPU kernels allocate their scratch memory.
template <typename Call>
void RunWithScratch(Arguments& arguments, Call* call) {
  arguments.CheckEnd();
  CheckStatus(call->Run(arguments.executor()));
}

#endif

// Runs a call that needs no scratch.
template <typename Call>
void Run(const Arguments& arguments, const Call& call) {
  arguments.CheckEnd();
  CheckStatus(call.Run(arguments.executor()));
}

// The plan of the call that kCallOf makes of plan parameters.
template <auto kCallOf>
Plan PlanOf(const PlanParameters& parameters) {
  return kCallOf(parameters).MakePlan();
}

// Any element type of this width and kind. Plans depend on nothing else about the type.
inline ElementType TypeOfWidth(int64_t bytes, bool is_floating) {
  switch (bytes) {
    case 1:
      return ElementType::kInt8;
    case 2:
      return is_floating ? ElementType::kFloat16 : ElementType::kInt16;
    case 4:
      return is_floating ? ElementType::kFloat32 : ElementType::kInt32;
    default:
      return is_floating ? ElementType::kFloat64 : ElementType::kInt64;
  }
}

}  // namespace jax_baracuda
