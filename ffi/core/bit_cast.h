// std::bit_cast of C++20.
#pragma once

#include <cstring>
#include <type_traits>

#include "ffi/core/element_type.h"

namespace jax_baracuda {

// Inlined also where the function around it is compiled for several instruction sets.
#ifdef __CUDACC__
#define JB_BIT_CAST JB_HOST_DEVICE
#else
#define JB_BIT_CAST __attribute__((always_inline)) inline
#endif

template <typename To, typename From>
JB_BIT_CAST To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<From>);
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace jax_baracuda
