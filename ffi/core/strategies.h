// The names of an op's strategies, in the order of their enumeration.
#pragma once

#include <cstddef>
#include <iterator>

namespace jax_baracuda {

template <typename Strategy, size_t kCount>
constexpr const char* NameOf(const char* const (&names)[kCount], Strategy strategy) {
  return names[static_cast<size_t>(strategy)];
}

}  // namespace jax_baracuda

// Strategy names as arguments of JB_CPU_TARGET and JB_CUDA_TARGET.
#define JB_NAMES(names) std::begin(names), std::end(names)
