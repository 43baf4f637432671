// Shared by CUDA handlers: the status of a launch as an FFI error, and the scratch buffer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "ffi/core/cuda_error_text.h"
#include "ffi/core/handler.h"
#include "ffi/core/operands.h"

namespace jax_baracuda {

inline ffi::Error ToError(const char* op, const CudaStatus& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(op) + ": " + CudaErrorText(status));
}

struct ScratchBuffer {
  void* data = nullptr;
  int64_t bytes = 0;
};

inline ffi::Error CheckScratch(const char* op, const ScratchBuffer& scratch, int64_t needed_bytes) {
  if (scratch.bytes >= needed_bytes) return ffi::Error::Success();
  return InvalidArgument(
      op, "scratch has " + std::to_string(scratch.bytes) + " bytes, expected " + std::to_string(needed_bytes));
}

// The scratch buffer is an optional last result. Calls that need no scratch omit it.
inline ffi::Error DecodeScratch(const OptionalResults& decoded, int64_t needed_bytes, ScratchBuffer* scratch) {
  const char* const op = decoded.op();
  const ffi::RemainingRets results = decoded.results();
  const size_t first = decoded.num_decoded();
  if (results.size() > first + 1) return InvalidArgument(op, "expected one scratch buffer at most");
  if (results.size() == first + 1) {
    auto buffer = results.get<ffi::AnyBuffer>(first);
    if (buffer.has_error()) return buffer.error();
    if ((*buffer)->element_type() != ffi::DataType::U8) {
      return UnsupportedType(op, "scratch", (*buffer)->element_type());
    }
    *scratch = ScratchBuffer{(*buffer)->untyped_data(), static_cast<int64_t>((*buffer)->element_count())};
  }
  return CheckScratch(op, *scratch, needed_bytes);
}

}  // namespace jax_baracuda
