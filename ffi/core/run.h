// How handlers run decoded calls on the back end of their module: every handler.cc is compiled for both.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "ffi/core/executor.h"
#include "ffi/core/handler.h"
#include "ffi/core/operands.h"
#include "ffi/core/target_table.h"
#ifdef JB_CUDA
#include "ffi/core/cuda_error_text.h"
#include "ffi/core/cuda_status.h"
#endif

namespace jax_baracuda {

// What XLA passes to a handler first: the stream or the thread pool.
using Context = std::remove_reference_t<Executor>;

#ifdef JB_CUDA

inline constexpr bool kOnCuda = true;

inline ffi::Error ToError(const char* op, const CudaStatus& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(op) + ": " + CudaErrorText(status));
}

// Runs a call with a scratch buffer, an optional last result: calls that need no scratch omit it. Run plans the call,
// and fails if its scratch is too small.
template <typename Call>
ffi::Error RunCall(Context stream, const OptionalResults& decoded, Call* call) {
  const char* const op = decoded.op();
  const ffi::RemainingRets results = decoded.results();
  const size_t first = decoded.num_decoded();
  if (results.size() > first + 1) return InvalidArgument(op, "expected one scratch buffer at most");
  if (results.size() == first + 1) {
    auto buffer = results.get<ffi::AnyBuffer>(first);
    if (buffer.has_error()) return buffer.error();
    const ffi::DataType type = (*buffer)->element_type();
    if (type != ffi::DataType::U8) return UnsupportedType(op, "scratch", type);
    call->scratch = (*buffer)->untyped_data();
    call->scratch_bytes = static_cast<int64_t>((*buffer)->element_count());
  }
  const CudaStatus status = call->Run(stream);
  if (status.ok()) return ffi::Error::Success();
  const int64_t needed_bytes = call->MakePlan().scratch_bytes;
  if (call->scratch_bytes >= needed_bytes) return ToError(op, status);
  return InvalidArgument(
      op, "scratch has " + std::to_string(call->scratch_bytes) + " bytes, expected " + std::to_string(needed_bytes));
}

#else

inline constexpr bool kOnCuda = false;

inline ffi::Error ToError(const char* op, bool has_memory) {
  if (has_memory) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(op) + ": out of host memory");
}

template <typename Call>
ffi::Error RunCall(Context pool, const OptionalResults& results, Call* call) {
  JB_RETURN_IF_ERROR(results.End());
  return ToError(results.op(), call->Run(pool));
}

#endif

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
