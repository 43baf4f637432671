// The text of a CUDA error. Not included by *.cu files, where <string> would slow down compilation.
#pragma once

#include <string>

#include "ffi/core/cuda_status.h"

namespace jax_baracuda {

// "file:line: expression: CUDA error NAME: text"
inline std::string CudaErrorText(const CudaStatus& status) {
  return std::string(status.file) + ":" + std::to_string(status.line) + ": " + status.expression + ": CUDA error " +
         cudaGetErrorName(status.code) + ": " + cudaGetErrorString(status.code);
}

}  // namespace jax_baracuda
