// Constants measured on an H200 (compute capability 9.0). Other GPUs use them until they are measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::rope {

struct Tuning {
  // Rows per thread with loads in flight.
  static constexpr int kRowsInFlight = 4;

  // A thread processes up to kMaxUnits units, which share sines and cosines. It processes fewer if a multiprocessor
  // would otherwise have less than kMinThreads threads; then the kernel of shared_angles.cuh runs if it supports the
  // call.
  static constexpr int64_t kMaxUnits = 8, kMinThreads = 256;

  // The number of threads that process neighbouring rows, so that a warp reads contiguous memory.
  static constexpr int64_t kContiguousThreads = 64;

  // Angles that a block shares: its threads, unless a row needs more, and the maximum size of its table of sines and
  // cosines.
  static constexpr int kSharingThreads = 128;
  static constexpr int64_t kMaxTableBytes = 16384;
};

}  // namespace jax_baracuda::rope
