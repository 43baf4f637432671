// Alignment of addresses, for CPU code and CUDA kernels.
#pragma once

#include <cstdint>

#include "ffi/core/host_device.h"

namespace jax_baracuda {

// The widest access of a GPU thread and of an SSE2 register.
inline constexpr int kVectorBytes = 16;

// A cache line of a CPU, and its longest vector register.
inline constexpr int64_t kCacheLine = 64;

// Whether all addresses are multiples of `bytes`. nullptr (an absent operand) counts as aligned.
template <typename... Pointers>
JB_HOST_DEVICE bool AreAligned(int bytes, const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % static_cast<unsigned>(bytes) == 0) && ...);
}

}  // namespace jax_baracuda
