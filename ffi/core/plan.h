// How a call runs, for whoever asks before it does; for .cu and .cc files alike.
#pragma once

#include <cstdint>

namespace jax_baracuda {

// How a call runs, decided from its shapes and flags alone. The handler decides by the same function.
struct Plan {
  const char* strategy;       // one of the target's strategies
  int64_t scratch_bytes = 0;  // of memory that the handler takes as an extra last result; 0: it takes none
};

// The strategy of a call that has nothing to do.
inline constexpr const char* kNothing = "nothing";

}  // namespace jax_baracuda
