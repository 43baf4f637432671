// Constants that were measured on one GPU. Others take its numbers, until somebody has measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::where {

// Compute capability 9.0, an H200.
struct Tuning90 {
  // The rows of a sum are cut into parts until there are so many blocks, more where a block's results are single
  // numbers, whose partial sums take no time. A part keeps at least so many steps of a block.
  static constexpr int64_t kWantedBlocks = 2048, kWantedBlocksOfNumbers = 8192, kMinSteps = 8;

  // Vectors of a thread that are under way at once.
  static constexpr int kVectorsInFlight = 4;

  // More threads share a result while each of them would have more than so many parts to add up.
  static constexpr int64_t kPartsOfLane = 8;
};

using Tuning = Tuning90;

}  // namespace jax_baracuda::where
