// Launchers of the CUDA kernels of causal_conv1d, callable from plain C++.
//
// They only enqueue work on `stream`: no allocation, no synchronisation, and equal problems make equal launches. They
// write every element of every result, including empty sums.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/core/cuda_status.h"

namespace jax_baracuda::causal_conv1d {

// How work is assigned to threads.
enum class Tiling {
  kNothing,
  kRows,                   // one row per warp
  kPackedRows,             // several rows per warp
  kSplitRows,              // several tiles per row
  kRowsByElement,          // any of these, without vector accesses
  kChannelsLast,           // a vector of channels per thread
  kChannelsLastByElement,  // one channel per thread
};

// Each tiling but kNothing has two names: without and with segment_ids.
#define JB_WITH_SEGMENT_IDS(name) name, name "_with_segment_ids"
inline constexpr const char* kForwardStrategyNames[] = {"nothing",
                                                        JB_WITH_SEGMENT_IDS("rows"),
                                                        JB_WITH_SEGMENT_IDS("packed_rows"),
                                                        JB_WITH_SEGMENT_IDS("split_rows"),
                                                        JB_WITH_SEGMENT_IDS("rows_by_element"),
                                                        JB_WITH_SEGMENT_IDS("channels_last"),
                                                        JB_WITH_SEGMENT_IDS("channels_last_by_element")};
#undef JB_WITH_SEGMENT_IDS

// Each of these is doubled again: without states, and with an initial or final state. A separate kernel adds the
// gradients of states.
#define JB_WITH_STATES(name) name, name "_and_states"
#define JB_WITH_SEGMENT_IDS(name) JB_WITH_STATES(name), JB_WITH_STATES(name "_with_segment_ids")
inline constexpr const char* kBackwardStrategyNames[] = {"nothing",
                                                         JB_WITH_SEGMENT_IDS("rows"),
                                                         JB_WITH_SEGMENT_IDS("packed_rows"),
                                                         JB_WITH_SEGMENT_IDS("split_rows"),
                                                         JB_WITH_SEGMENT_IDS("rows_by_element"),
                                                         JB_WITH_SEGMENT_IDS("channels_last"),
                                                         JB_WITH_SEGMENT_IDS("channels_last_by_element"),
                                                         JB_WITH_STATES("no_inputs")};
#undef JB_WITH_SEGMENT_IDS
#undef JB_WITH_STATES

enum class UpdateStrategy {
  kNothing,
  kOneInput,  // vectors of channels; rows if width > kMaxConstantWidth
  kFewInputs,
  kManyInputs,  // a convolution, then the new state
};

inline constexpr const char* kUpdateStrategyNames[] = {"nothing", "one_input", "few_inputs", "many_inputs"};

// These depend only on shapes, flags, and whether all arrays are aligned to vectors. They call no CUDA function.
// `is_shared`: whether the batch shares an array of x's shape.
Tiling ChooseForward(const Problem& problem, int64_t element_bytes, bool is_shared, bool is_aligned = true);
Tiling ChooseBackward(const Problem& problem, int64_t element_bytes, bool is_shared, bool is_aligned = true);
UpdateStrategy ChooseUpdate(const Problem& problem, int64_t element_bytes, int64_t state_length,
                            bool is_aligned = true);

CudaStatus LaunchForward(const ForwardCall& call, cudaStream_t stream);

// Bytes of scratch memory that LaunchBackward needs. Depends only on shapes and flags; calls no CUDA function.
int64_t BackwardScratchBytes(const Problem& problem, int64_t element_bytes);

CudaStatus LaunchBackward(const BackwardCall& call, cudaStream_t stream);

CudaStatus LaunchUpdate(const UpdateCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::causal_conv1d
