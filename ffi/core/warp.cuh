// The threads of a warp.
#pragma once

#include <cstdint>

namespace jax_baracuda {

inline constexpr int kWarpThreads = 32;
inline constexpr uint32_t kFullWarp = 0xffffffffu;  // mask of all lanes

}  // namespace jax_baracuda
