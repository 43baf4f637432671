// Arithmetic on sizes.
#pragma once

#include <cstdint>

#include "ffi/core/element_type.h"

namespace jax_baracuda {

JB_HOST_DEVICE constexpr int64_t CeilDivide(int64_t dividend, int64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

}  // namespace jax_baracuda
