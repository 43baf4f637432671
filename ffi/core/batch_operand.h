// Operands of a call with a batch, which may share them. For .cu and .cc files.
#pragma once

#include <cstdint>

#include "ffi/core/host_device.h"

namespace jax_baracuda {

// One array per batch element, or one that all of them share.
struct BatchOperand {
  const void* data = nullptr;  // nullptr if an optional operand is absent
  bool is_shared = true;       // also if absent

  // The array of a batch element; each has `size` numbers.
  template <typename T>
  JB_ALWAYS_INLINE const T* Of(int64_t batch, int64_t size) const {
    return static_cast<const T*>(data) + (is_shared ? 0 : batch * size);
  }
};

// The same with a known type and size.
template <typename T>
struct BatchArray {
  const T* data = nullptr;
  int64_t stride = 0;  // from one batch element to the next; 0 if they share the array

  BatchArray() = default;
  BatchArray(const T* array, int64_t array_stride) : data(array), stride(array_stride) {}
  BatchArray(const BatchOperand& operand, int64_t size)
      : data(static_cast<const T*>(operand.data)), stride(operand.is_shared ? 0 : size) {}

  JB_ALWAYS_INLINE const T* Of(int64_t batch) const { return data + batch * stride; }
};

}  // namespace jax_baracuda
