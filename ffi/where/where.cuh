// The plans of where and its gradient on GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/where/where.h"

namespace jax_baracuda::where {

enum class Strategy {
  kNothing,
  kVectors,
  kElements,  // arrays that are not aligned, or rows of repeated operands that are shorter than a vector
  kSumVectors,
  kSumElements,  // also if vectors would cross into the next sum or change their columns
};

inline constexpr const char* kStrategyNames[] = {"nothing", "vectors", "elements", "sum_vectors", "sum_elements"};

// The assignment of a sum to threads. If rows are longer than a block, a block processes a tile of one row per step.
// Otherwise a group of threads processes several whole rows per step, so that a thread always has the same columns.
struct SumTiling {
  int group;  // threads per group: a power of two
  int used;   // threads of a group that have work
  int64_t rows_of_step, tiles;
  int64_t blocks_of_outer;  // blocks per tile and part
  int64_t rows_of_part, parts;

  int64_t blocks() const { return blocks_of_outer * tiles * parts; }
};

struct SplitPlan {
  Strategy strategy;
  SumTiling tiling{};         // of sums
  int64_t scratch_bytes = 0;  // the partial sums, if rows are split into parts
};

// For calls with sums.
SplitPlan ChooseSums(const SplitCall& call);
CudaStatus LaunchSums(const SplitCall& call, const SplitPlan& plan, cudaStream_t stream);

}  // namespace jax_baracuda::where
