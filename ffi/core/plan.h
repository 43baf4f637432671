// How a call will run. For .cu and .cc files.
#pragma once

#include <cstdint>

namespace jax_baracuda {

// Depends only on the shapes and flags of the call. The handler makes its plan with the same function.
struct Plan {
  const char* strategy;       // one of the target's strategies
  int64_t scratch_bytes = 0;  // size of the scratch buffer, an extra last result; 0: no such result
};

// The strategy of a call without work.
inline constexpr const char* kNothing = "nothing";

}  // namespace jax_baracuda
