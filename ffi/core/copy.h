// The copy of an operand to the result that replaces it, which is made before the result is written in place. For .cu and
// .cc files.
#pragma once

#include <cstdint>

namespace jax_baracuda {

struct Copy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;  // 0 if XLA aliased the two

  Copy() = default;
  Copy(void* result, const void* operand, int64_t size)
      : to(result), from(operand), bytes(result == operand ? 0 : size) {}
};

}  // namespace jax_baracuda
