// The names of an op's strategies, in the order of their enumeration.
#pragma once

#include <cstddef>
#include <iterator>
#include <vector>

namespace jax_baracuda {

template <typename Strategy, size_t kCount>
constexpr const char* NameOf(const char* const (&names)[kCount], Strategy strategy) {
  return names[static_cast<size_t>(strategy)];
}

// The names of some strategies, as an argument of JB_TARGET.
template <size_t kCount, typename... Strategies>
std::vector<const char*> NamesOf(const char* const (&names)[kCount], Strategies... strategies) {
  return {NameOf(names, strategies)...};
}

}  // namespace jax_baracuda

// All names of an array, as arguments of JB_TARGET.
#define JB_NAMES(names) std::begin(names), std::end(names)
