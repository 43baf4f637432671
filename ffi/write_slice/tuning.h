// Constants that were measured on one GPU. Others take its numbers, until somebody has measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::write_slice {

// Compute capability 9.0, an H200.
struct Tuning90 {
  // Blocks share long rows, of which a thread takes so many items (words, or vectors of the array).
  static constexpr int kItemsOfThread = 4;
  // They do so in windows of at least so many items, for in smaller ones latency counts, and only if rows fill this
  // fraction of their blocks, so that few threads are idle.
  static constexpr int64_t kMinSharedItems = int64_t{1} << 18;
  static constexpr int64_t kMinFillNumerator = 4, kMinFillDenominator = 5;

  // Windows up to this size take the kernel in which each thread has one word.
  static constexpr int64_t kMaxSmallWords = int64_t{1} << 18;
};

using Tuning = Tuning90;

}  // namespace jax_baracuda::write_slice
