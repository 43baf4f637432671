// The minimum number of resident blocks to request per multiprocessor.
#pragma once

namespace jax_baracuda {

// Maximum resident threads per multiprocessor of the architecture being compiled.
#if !defined(__CUDA_ARCH__)
inline constexpr int kMultiprocessorThreads = 2048;
#elif (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100
inline constexpr int kMultiprocessorThreads = 1536;
#else
inline constexpr int kMultiprocessorThreads = 2048;
#endif

// The second argument of __launch_bounds__: `blocks`, capped to what a multiprocessor can hold. ptxas ignores a larger
// number and then does not cap the registers at all.
constexpr int MinBlocks(int threads, int blocks) {
  const int fitting = kMultiprocessorThreads / threads;
  return blocks < fitting ? blocks : fitting > 1 ? fitting : 1;
}

}  // namespace jax_baracuda
