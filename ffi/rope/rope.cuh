// Launcher of the CUDA kernels of rope, callable from plain C++.
//
// It only enqueues work on `stream`: no allocation, no synchronisation, and equal problems make equal launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

enum class Strategy {
  kNothing,
  kSharedAngles,  // the threads of a block share sines and cosines: for few rows
  kManyRows,
  kByElement,  // the kernel for many rows, for rows that vectors do not fit
};

inline constexpr const char* kStrategyNames[] = {"nothing", "shared_angles", "many_rows", "by_element"};

struct RopePlan {
  Strategy strategy = Strategy::kNothing;
  int64_t units = 0;            // per row
  int64_t units_of_thread = 0;  // 0: fewer units than threads
};

// `all_heads`: the heads of all tensors together. `are_aligned`: whether all tensors are aligned to vectors.
// `are_all_written`: whether features that are not rotated are copied.
RopePlan Choose(const Problem& problem, int64_t all_heads, int64_t element_bytes, int64_t multiprocessors,
                bool are_aligned = true, bool are_all_written = true);

CudaStatus LaunchRope(const Call& call, cudaStream_t stream);

}  // namespace jax_baracuda::rope
