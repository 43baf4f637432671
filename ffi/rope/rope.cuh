// Launcher of the CUDA kernel of rope, callable from plain C++.
//
// It enqueues work on `stream` only: no allocation, no synchronisation, the same launch if the problem is the same.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

// Which kernel rotates, and by vectors of how many bytes.
enum class Strategy {
  kNothing,
  kFewRowsBy16Bytes,
  kFewRowsBy8Bytes,
  kFewRowsByElement,
  kManyRowsBy16Bytes,
  kManyRowsBy8Bytes,
  kManyRowsByElement,
};

inline constexpr const char* kStrategyNames[] = {"nothing",
                                                 "few_rows_by_16_bytes",
                                                 "few_rows_by_8_bytes",
                                                 "few_rows_by_element",
                                                 "many_rows_by_16_bytes",
                                                 "many_rows_by_8_bytes",
                                                 "many_rows_by_element"};

// For a device with so many multiprocessors, and tensors of which all are aligned to so many bytes: at least an
// element. `all_heads` are those of all tensors.
Strategy ChooseStrategy(const Problem& problem, int64_t all_heads, int64_t element_bytes, int64_t multiprocessors,
                        int64_t alignment = 16);

CudaStatus LaunchRope(const Call& call, cudaStream_t stream);

}  // namespace jax_baracuda::rope
