// Arithmetic on sizes.
#pragma once

#include <cstdint>

#include "ffi/core/host_device.h"

namespace jax_baracuda {

JB_HOST_DEVICE constexpr int64_t CeilDivide(int64_t dividend, int64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

JB_HOST_DEVICE constexpr int64_t RoundUp(int64_t number, int64_t multiple) {
  return CeilDivide(number, multiple) * multiple;
}

// The product of dimension sizes; 0 on overflow. Only an array without elements can overflow, and its product is 0.
inline int64_t MultiplySizes(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? 0 : product;
}

}  // namespace jax_baracuda
