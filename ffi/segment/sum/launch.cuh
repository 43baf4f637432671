// Launchers of the CUDA kernels of segment_sum, segment_mean and their gradients, callable from plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/core/element_type.h"
#include "ffi/core/plan.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// How LaunchSum runs. `indices_are_sorted` and `deterministic` as in SumArguments.
Plan PlanSum(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool deterministic, bool is_mean);

struct SumArguments {
  Problem problem;
  ElementType type;
  bool ids_are_64_bit;
  bool indices_are_sorted;
  bool deterministic;  // terms are added in an order that does not depend on timing, also where that is slower
  const void* data;
  const void* segment_ids;
  void* output;
  int32_t* count;  // [batch, segments] for means, else nullptr
  void* scratch;
  int64_t scratch_bytes;
};

CudaStatus LaunchSum(const SumArguments& arguments, cudaStream_t stream);

struct GatherArguments {
  Problem problem;  // `data_is_shared` has no meaning here
  ElementType type;  // a floating type
  bool ids_are_64_bit;
  const void* cells;     // [batch or 1, segments, features]
  bool cells_are_shared;
  const int32_t* count;  // [batch or 1, segments] to divide the cells by, or nullptr
  bool count_is_shared;
  const void* segment_ids;
  void* rows;  // [batch, rows, features]
};

// How LaunchGather runs.
Plan PlanGather(const Problem& problem, int64_t element_bytes);

// Gives every row its segment's cells, 0 where the row is dropped.
CudaStatus LaunchGather(const GatherArguments& arguments, cudaStream_t stream);

}  // namespace jax_baracuda::segment
