// std::bit_cast of C++20, and the unsigned integer type with the size of a given type.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/core/host_device.h"

namespace jax_baracuda {

template <typename To, typename From>
JB_ALWAYS_INLINE To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<From>);
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// The unsigned integer as wide as T. T has 1, 2, 4 or 8 bytes.
template <typename T>
using BitsOf = std::conditional_t<
    sizeof(T) == 1, uint8_t,
    std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

}  // namespace jax_baracuda
