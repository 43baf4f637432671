// Launchers of the CUDA kernels of causal_conv1d, callable from plain C++.
//
// Each enqueues work on `stream` only: no allocation, no synchronisation, the same launches whenever the problem is the
// same. Every element of every result is written, also where there is nothing to sum.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/core/cuda_status.h"

namespace jax_baracuda::causal_conv1d {

// How the work of a layout is assigned.
enum class Tiling {
  kNothing,
  kRows,                   // a warp takes a row
  kPackedRows,             // or several
  kSplitRows,              // or part of one
  kRowsByElement,          // without vectors, however it is cut
  kChannelsLast,           // a thread takes a vector of channels
  kChannelsLastByElement,  // or one
};

// The tilings that are not nothing, each without and with segment_ids.
#define JB_WITH_SEGMENT_IDS(name) name, name "_with_segment_ids"
inline constexpr const char* kForwardStrategyNames[] = {"nothing",
                                                        JB_WITH_SEGMENT_IDS("rows"),
                                                        JB_WITH_SEGMENT_IDS("packed_rows"),
                                                        JB_WITH_SEGMENT_IDS("split_rows"),
                                                        JB_WITH_SEGMENT_IDS("rows_by_element"),
                                                        JB_WITH_SEGMENT_IDS("channels_last"),
                                                        JB_WITH_SEGMENT_IDS("channels_last_by_element")};
#undef JB_WITH_SEGMENT_IDS

// The same, each without states and with an initial or a final one, whose gradients a kernel of their own adds.
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
  kOneInput,  // vectors of channels
  kFewInputs,
  kManyInputs,  // a convolution, then the new state
};

inline constexpr const char* kUpdateStrategyNames[] = {"nothing", "one_input", "few_inputs", "many_inputs"};

// All of these depend on shapes and flags alone, and on whether all arrays are aligned to vectors, or not. They call no
// CUDA function. `is_shared` tells whether the batch shares an array that is shaped as x.
Tiling ChooseForward(const Problem& problem, int64_t element_bytes, bool is_shared, bool is_aligned = true);
Tiling ChooseBackward(const Problem& problem, int64_t element_bytes, bool is_shared, bool is_aligned = true);
UpdateStrategy ChooseUpdate(const Problem& problem, int64_t element_bytes, int64_t state_length,
                            bool is_aligned = true);

CudaStatus LaunchForward(const ForwardCall& call, cudaStream_t stream);

// Bytes of scratch memory that LaunchBackward needs. Depends on shapes and flags alone; calls no CUDA function.
int64_t BackwardScratchBytes(const Problem& problem, int64_t element_bytes);

CudaStatus LaunchBackward(const BackwardCall& call, cudaStream_t stream);

CudaStatus LaunchUpdate(const UpdateCall& call, cudaStream_t stream);

}  // namespace jax_baracuda::causal_conv1d
