// Constants measured on an H200 (compute capability 9.0). Other GPUs use them until they are measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::where {

struct Tuning {
  // The rows of a sum are split into parts until there are kWantedBlocks blocks. Sums of contiguous numbers use more
  // blocks: a block has one result per sum, so partial sums cost no time. A part has at least kMinSteps steps of a
  // block.
  static constexpr int64_t kWantedBlocks = 2048, kWantedBlocksOfNumbers = 8192, kMinSteps = 8;

  // Vector loads in flight per thread.
  static constexpr int kVectorsInFlight = 4;

  // The threads per result double until each adds up at most kPartsOfLane parts.
  static constexpr int64_t kPartsOfLane = 8;
};

}  // namespace jax_baracuda::where
