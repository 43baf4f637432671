// Constants that were measured on one GPU. Others take its numbers, until somebody has measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::causal_conv1d {

// A kernel for rows along the length in the model of its time: see RowsPlan.
struct RowsChoice {
  int blocks_at_once;        // on a multiprocessor
  double steps_to_start;     // that a tile could take in the time in which it starts and ends
  int min_steps, max_steps;  // of a tile: no more than kMaxSteps
  double slowness[4];  // of groups of 32, 16, 8 and 4 threads, for the same work: the fewer, the fewer bytes at once
};

// A kernel for channels last, likewise: see ChannelsLastPlan.
struct RunChoice {
  int min_run, max_run;  // times
  int blocks_at_once;    // on a multiprocessor
};

// Compute capability 9.0, an H200.
struct Tuning90 {
  // Plans are made for so many, whatever the device: the number of partial sums must not depend on it.
  static constexpr int64_t kMultiprocessors = 132;

  // ---- Rows along the length.

  // Steps whose vectors are under way, so that their bytes cover the latency of DRAM. In the backward kernel, the step
  // at work is one of them.
  static constexpr int kPrefetchSteps = 6;

  // Minimum resident blocks per multiprocessor, which caps the registers; tuned for widths up to 4 and elements up to 4
  // bytes. With same_sequence, one more spills.
  static constexpr int ForwardRowsBlocks(int element_bytes, int width, bool has_same_sequence) {
    return element_bytes > 4 || width > 4 ? 1 : has_same_sequence ? 9 : 10;
  }
  static constexpr int BackwardRowsBlocks(int element_bytes, int width, bool has_same_sequence) {
    return element_bytes > 4 || width > 4 ? 1 : has_same_sequence ? 5 : 6;
  }

  // In short tiles all loads are under way at once, and what a multiprocessor reads lies closer together. With
  // same_sequence, what comes before the first step takes longer.
  static constexpr RowsChoice ForwardRows(int64_t element_bytes, bool has_same_sequence) {
    return {/*blocks_at_once=*/element_bytes > 4 ? 8 : 10, /*steps_to_start=*/0.5, /*min_steps=*/4,
            /*max_steps=*/has_same_sequence ? 24 : kPrefetchSteps, /*slowness=*/{1, 1.07, 1.16, 1.4}};
  }
  // With same_sequence, narrow groups gain: a sequence begins less often in the steps of fewer threads.
  static constexpr RowsChoice BackwardRows(int64_t element_bytes, bool has_same_sequence) {
    if (has_same_sequence) {
      return {/*blocks_at_once=*/element_bytes > 4 ? 4 : 5, /*steps_to_start=*/3, /*min_steps=*/2,
              /*max_steps=*/32, /*slowness=*/{1.07, 1, 1.07, 1.4}};
    }
    return {/*blocks_at_once=*/element_bytes > 4 ? 4 : 6, /*steps_to_start=*/3, /*min_steps=*/2,
            /*max_steps=*/20, /*slowness=*/{1, 1.07, 1.16, 1.4}};
  }

  // The end of a launch, while the GPU is not full, as a part of the time of a tile.
  static constexpr double kTailOfLaunch = 0.2;

  // ---- Channels last.

  static constexpr int kMinRun = 8;
  // Minimum resident blocks per multiprocessor, tuned as above. In 16 bits, one more makes the backward
  // kernel spill.
  static constexpr int ForwardChannelsLastBlocks(int element_bytes, int width) {
    return width > 4 ? 1 : element_bytes == 2 ? 8 : 6;
  }
  static constexpr int BackwardChannelsLastBlocks(int element_bytes, int width) {
    return element_bytes > 4 || width > 4 ? 1 : element_bytes == 4 ? 3 : 4;
  }

  // All of a forward run is under way at once. Longer runs would save loads of what comes before them, but are farther
  // apart in memory. Backward runs end with a sum over the block and begin with a halo, and so are long.
  static constexpr RunChoice ForwardRun(int element_bytes) {
    return {kMinRun, /*max_run=*/12, ForwardChannelsLastBlocks(element_bytes, /*width=*/4)};
  }
  static constexpr RunChoice BackwardRun() { return {2 * kMinRun, /*max_run=*/512, /*blocks_at_once=*/4}; }

  // The times that a block could take in the time in which it starts and ends.
  static constexpr int64_t kTimesToStart = 12;

  // Times that shared memory has room for. The backward kernel has more of them where vectors are narrow.
  static constexpr int kForwardStageTimes = 16, kBackwardNarrowStageTimes = 16, kBackwardStageTimes = 8;

  // ---- The sums of parameters' gradients. A thread adds up at least so many partial sums, if there are as many, whose
  // loads are under way at once. Blocks have about kSumThreads threads, but take no fewer channels than fill a sector.
  static constexpr int kPartialsOfThread = 8;
  static constexpr int kSumThreads = 256, kMinSumChannels = 8, kMaxSumChannels = 128, kMaxSumLanes = 128;

  // ---- The update. A thread takes so many bytes of channels: the states of a thread are few, and those of a warp fill
  // whole sectors. With more new inputs than kMaxFewInputs, a row is worth more than one thread.
  static constexpr int kUpdateBytes = 8;
  static constexpr int64_t kMaxFewInputs = 16;
};

using Tuning = Tuning90;

}  // namespace jax_baracuda::causal_conv1d
