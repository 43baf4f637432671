// What kernels share that exchange values within a warp.
#pragma once

#include <cstdint>

namespace jax_baracuda {

inline constexpr uint32_t kFullWarp = 0xffffffffu;  // all lanes take part

}  // namespace jax_baracuda
