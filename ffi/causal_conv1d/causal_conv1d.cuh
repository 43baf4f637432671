// The plans of the causal_conv1d ops on GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/core/cuda_status.h"
#include "ffi/core/strategies.h"

namespace jax_baracuda::causal_conv1d {

inline constexpr int kRowsThreads = 128, kChannelsLastThreads = 128;  // per block
inline constexpr int64_t kSectorBytes = 32;

enum class Strategy {
  kNothing,                // no inputs: only states and parameter gradients are written
  kRows,                   // [.., channels, length]
  kRowsByElement,          // without vector accesses
  kChannelsLast,           // [.., length, channels]; a vector of channels per thread
  kChannelsLastByElement,  // one channel per thread
  // Of updates only.
  kOneInput,  // vectors of channels
  kFewInputs,
  kManyInputs,  // a convolution, then the new state
  // Of updates of a pool only.
  kPoolVectors,    // vectors of channels
  kPoolByElement,  // one channel per thread
};

inline constexpr const char* kStrategyNames[] = {
    kNothing,    "rows",       "rows_by_element", "channels_last", "channels_last_by_element",
    "one_input", "few_inputs", "many_inputs",     "pool_vectors",  "pool_by_element"};

// The cut of rows into tiles: see rows.cuh.
struct RowsPlan {
  int lanes;  // threads per group: a power of two, 4 to 32
  int log_lanes;
  int steps;      // per tile
  int64_t tiles;  // per row
  int64_t warps;
};

// The cut of channels-last arrays into runs: see channels_last.cuh.
struct ChannelsLastPlan {
  int lanes;            // threads of a block along the channels
  int runs;             // runs per block
  int run;              // times per run
  int64_t blocks_down;  // blocks along the length
};

// `rows` and `channels_last` depend only on shapes, not on addresses or the device: the number of partial sums must not
// depend on those.
struct ConvolutionPlan {
  Strategy strategy = Strategy::kNothing;
  RowsPlan rows{};
  ChannelsLastPlan channels_last{};
  int64_t parts = 0;          // of a gradient: partial sums per channel and batch element
  int64_t scratch_bytes = 0;  // of a gradient

  Plan Summary() const { return {NameOf(kStrategyNames, strategy), scratch_bytes}; }
};

// At most four channels, at most 16 bytes.
constexpr int WidestChannels(int64_t element_bytes) { return element_bytes == 8 ? 2 : 4; }

// These depend only on shapes, flags, and whether all arrays are aligned to vectors. They call no CUDA function. Calls
// without data have the plan of aligned arrays.
ConvolutionPlan PlanOf(const OutputCall& call);
ConvolutionPlan PlanOf(const BackwardCall& call);
ConvolutionPlan PlanOf(const UpdateCall& call);
ConvolutionPlan PlanOf(const PoolUpdateCall& call);

// For channels-last arrays with elements.
CudaStatus LaunchChannelsLast(const OutputCall& call, const ConvolutionPlan& plan, cudaStream_t stream);
CudaStatus LaunchChannelsLast(const RaggedCall& call, const ConvolutionPlan& plan, cudaStream_t stream);
CudaStatus LaunchChannelsLast(const BackwardCall& call, const ConvolutionPlan& plan, cudaStream_t stream);

}  // namespace jax_baracuda::causal_conv1d
