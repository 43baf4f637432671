// Launcher of the CUDA kernels of rope, callable from plain C++.
//
// It only enqueues work on `stream`: no allocation, no synchronisation, and equal problems make equal launches.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

// The kernel, and its vector width in bytes.
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

// `alignment`: the alignment of all tensors in bytes, at least the element size. `all_heads`: the heads of all tensors
// together.
Strategy ChooseStrategy(const Problem& problem, int64_t all_heads, int64_t element_bytes, int64_t multiprocessors,
                        int64_t alignment = 16);

CudaStatus LaunchRope(const Call& call, cudaStream_t stream);

}  // namespace jax_baracuda::rope
