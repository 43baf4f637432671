// Constants measured on one GPU. Other GPUs use them until they are measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::write_slice {

// Compute capability 9.0, an H200.
struct Tuning90 {
  // Items (words, or vectors of the array) per thread if long rows are split among blocks.
  static constexpr int kItemsOfThread = 4;
  // Rows are split only in windows of at least kMinSharedItems items, because smaller ones are latency-bound. Rows must
  // also fill this fraction of their blocks, so that few threads are idle.
  static constexpr int64_t kMinSharedItems = int64_t{1} << 18;
  static constexpr int64_t kMinFillNumerator = 4, kMinFillDenominator = 5;

  // Windows up to this size use the kernel with one word per thread.
  static constexpr int64_t kMaxSmallWords = int64_t{1} << 18;
};

using Tuning = Tuning90;

}  // namespace jax_baracuda::write_slice
