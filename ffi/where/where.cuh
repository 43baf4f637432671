// Launchers of the CUDA kernels of where and its gradient, callable from plain C++.
//
// They only enqueue work on `stream`: no allocation, no synchronisation, and equal problems make equal launches. They
// write every element of every result, including empty sums.
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

// They call no CUDA function. Calls without data have the plan of aligned arrays.
Strategy Choose(const SelectCall& call);
SplitPlan Choose(const SplitCall& call);

// The implementation of Choose for calls with sums.
SplitPlan ChooseSums(const SplitCall& call);

CudaStatus LaunchSelect(const SelectCall& call, cudaStream_t stream);

// `scratch` has plan.scratch_bytes bytes.
CudaStatus LaunchSplit(const SplitCall& call, const SplitPlan& plan, void* scratch, cudaStream_t stream);

// The implementation of LaunchSplit for calls with sums.
CudaStatus LaunchSums(const SplitCall& call, const SplitPlan& plan, void* scratch, cudaStream_t stream);

}  // namespace jax_baracuda::where
