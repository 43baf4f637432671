// Constants measured on an H200 (compute capability 9.0). Other GPUs use them until they are measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::causal_conv1d {

// Parameters of the time model of a kernel for rows along the length: see PlanRows.
struct RowsChoice {
  int blocks_at_once;        // resident blocks per multiprocessor
  double steps_to_start;     // fixed cost of a tile, in steps
  int min_steps, max_steps;  // per tile, at most kMaxSteps
  double slowness[4];        // relative time of groups of 32, 16, 8, 4 threads: narrow ones access less memory at once
};

// Parameters of the time model of a channels-last kernel: see PlanChannelsLast.
struct RunChoice {
  int min_run, max_run;  // times per run
  int blocks_at_once;    // resident blocks per multiprocessor
};

struct Tuning {
  // Plans assume this count on every device, because the number of partial sums must not depend on the device.
  static constexpr int64_t kMultiprocessors = 132;

  // ---- Rows along the length.

  // Prefetch distance in steps, to cover the latency of DRAM. In the backward kernel it includes the current step.
  static constexpr int kPrefetchSteps = 6;

  // Minimum resident blocks per multiprocessor, which caps the registers. Tuned for widths up to 4 and elements up to 4
  // bytes. With same_sequence, one more block makes the kernel spill.
  static constexpr int ForwardRowsBlocks(int element_bytes, int width, bool has_same_sequence) {
    return element_bytes > 4 || width > 4 ? 1 : has_same_sequence ? 9 : 10;
  }
  static constexpr int BackwardRowsBlocks(int element_bytes, int width, bool has_same_sequence) {
    return element_bytes > 4 || width > 4 ? 1 : has_same_sequence ? 5 : 6;
  }

  // Short tiles have all loads in flight at once, and the reads of a multiprocessor are closer together. With
  // same_sequence tiles may be longer, since the work before the first step costs more.
  static constexpr RowsChoice ForwardRows(int64_t element_bytes, bool has_same_sequence) {
    return {/*blocks_at_once=*/element_bytes > 4 ? 8 : 10, /*steps_to_start=*/0.5, /*min_steps=*/4,
            /*max_steps=*/has_same_sequence ? 24 : kPrefetchSteps, /*slowness=*/{1, 1.07, 1.16, 1.4}};
  }
  // With same_sequence narrower groups are faster: fewer of their steps contain the start of a sequence.
  static constexpr RowsChoice BackwardRows(int64_t element_bytes, bool has_same_sequence) {
    if (has_same_sequence) {
      return {/*blocks_at_once=*/element_bytes > 4 ? 4 : 5, /*steps_to_start=*/3, /*min_steps=*/2,
              /*max_steps=*/32, /*slowness=*/{1.07, 1, 1.07, 1.4}};
    }
    return {/*blocks_at_once=*/element_bytes > 4 ? 4 : 6, /*steps_to_start=*/3, /*min_steps=*/2,
            /*max_steps=*/20, /*slowness=*/{1, 1.07, 1.16, 1.4}};
  }

  // The tail of a launch, while the GPU is not full, as a fraction of a tile's time.
  static constexpr double kTailOfLaunch = 0.2;

  // ---- Channels last.

  static constexpr int kMinRun = 8;
  // Minimum resident blocks per multiprocessor, tuned as above. With 16-bit elements, one more block makes the backward
  // kernel spill.
  static constexpr int ForwardChannelsLastBlocks(int element_bytes, int width) {
    return width > 4 ? 1 : element_bytes == 2 ? 8 : 6;
  }
  static constexpr int BackwardChannelsLastBlocks(int element_bytes, int width) {
    return element_bytes > 4 || width > 4 ? 1 : element_bytes == 4 ? 3 : 4;
  }

  // All loads of a forward run are in flight at once. Longer runs would load fewer halo inputs, but are farther apart
  // in memory. Backward runs are long, because each has a halo at its start and a reduction over the block at its end.
  static constexpr RunChoice ForwardRun(int element_bytes) {
    return {kMinRun, /*max_run=*/12, ForwardChannelsLastBlocks(element_bytes, /*width=*/4)};
  }
  static constexpr RunChoice BackwardRun() { return {2 * kMinRun, /*max_run=*/512, /*blocks_at_once=*/4}; }

  // Fixed cost of a block, in times of a run.
  static constexpr int64_t kTimesToStart = 12;

  // Times per thread in shared memory. The backward kernel has more stages if vectors are narrow.
  static constexpr int kForwardStageTimes = 16, kBackwardNarrowStageTimes = 16, kBackwardStageTimes = 8;

  // ---- The sums of the parameter gradients. A thread adds up at least kPartialsOfThread partial sums, if there are
  // enough, to have that many loads in flight. Blocks have about kSumThreads threads, and at least enough channels to
  // fill a sector.
  static constexpr int kPartialsOfThread = 8;
  static constexpr int kSumThreads = 256, kMinSumChannels = 8, kMaxSumChannels = 128, kMaxSumLanes = 128;

  // ---- The update. A thread updates kUpdateBytes of channels: few states per thread, but those of a warp fill whole
  // sectors. With more new inputs than kMaxFewInputs, one thread per row is too slow. 128 x 8192 rows of bfloat16,
  // 4 taps (H100): 29 us in place of 113 for 4 inputs, 200 in place of 123 for 16.
  static constexpr int kUpdateBytes = 8;
  static constexpr int64_t kMaxFewInputs = 8;
};

}  // namespace jax_baracuda::causal_conv1d
