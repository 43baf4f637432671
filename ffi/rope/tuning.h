// Constants that were measured on one GPU. Others take its numbers, until somebody has measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::rope {

// Compute capability 9.0, an H200.
struct Tuning90 {
  // Rows of which a thread's units are under way at once.
  static constexpr int kRowsInFlight = 4;

  // A thread takes up to kMaxUnits units, which share sines and cosines, but fewer where a multiprocessor
  // would have less than kMinThreads threads. Then the kernel for few rows takes the call if it can.
  static constexpr int64_t kMaxUnits = 8, kMinThreads = 256;

  // So many threads take neighbouring rows, so that what a warp reads lies together.
  static constexpr int64_t kContiguousThreads = 64;

  // The kernel for few rows: threads of a block, unless a row needs more, and the most bytes of its table of sines and
  // cosines.
  static constexpr int kSharingThreads = 128;
  static constexpr int64_t kMaxTableBytes = 16384;
};

using Tuning = Tuning90;

}  // namespace jax_baracuda::rope
