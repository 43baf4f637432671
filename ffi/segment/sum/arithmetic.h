// The rounding of sums, shared by the CPU and the CUDA kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ffi/core/bit_cast.h"
#include "ffi/core/element_type.h"
#include "ffi/core/host_device.h"

namespace jax_baracuda::segment {

// `value`, of the compute type or of double, as a number of the compute type that rounds to the same T. For 16-bit types,
// doubles are rounded to odd: if `value` is between two floats, the result is the one with an odd last bit. So it is never
// halfway between two numbers of T unless `value` is.
template <typename T, typename C>
JB_ALWAYS_INLINE ComputeType<T> RoundedFor(C value) {
  if constexpr (std::is_same_v<C, ComputeType<T>>) {
    return value;
  } else {
    const float nearest = static_cast<float>(value);
    if constexpr (sizeof(T) == 4) return nearest;
    const double back = static_cast<double>(nearest);
    const uint32_t bits = BitCast<uint32_t>(nearest);
    const bool is_farther = (back < 0 ? -back : back) > (value < 0 ? -value : value);
    const uint32_t odd = (bits - (is_farther ? 1u : 0u)) | 1u;
    const bool is_exact = back == value || value != value;
    return BitCast<float>(is_exact ? bits : odd);
  }
}

}  // namespace jax_baracuda::segment
