// Launchers of the CUDA kernels of segment_max, segment_min, segment_argmax, segment_argmin and their gradients,
// callable from plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/core/element_type.h"
#include "ffi/core/plan.h"
#include "ffi/segment/extremum/arithmetic.h"

namespace jax_baracuda::segment {

// How LaunchExtremum runs. Depends on the shapes and flags alone; calls no CUDA function.
Plan PlanExtremum(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool with_winner);

struct ExtremumArguments {
  Problem problem;
  ElementType type;
  bool ids_are_64_bit;
  bool indices_are_sorted;
  bool is_minimum;
  bool first_wins;
  const void* data;
  const void* segment_ids;
  void* output;
  int32_t* winner;  // nullptr when only the maximum is wanted
  int32_t* order;   // [batch, rows] or nullptr: a permutation of each element's rows that brings segments together
  void* scratch;
  int64_t scratch_bytes;
};

// Writes every element of output (and winner). Enqueues work on `stream` only: no allocation, no synchronisation, the
// same launches whenever the problem is the same.
CudaStatus LaunchExtremum(const ExtremumArguments& arguments, cudaStream_t stream);

struct ExtremumBackwardArguments {
  Problem problem;
  ElementType type;  // a floating type
  bool ids_are_64_bit;
  const void* d_output;
  const int32_t* winner;
  const void* segment_ids;
  const int32_t* order;  // [batch or 1, rows] or nullptr: an order of the rows that visits segments together
  bool order_is_shared;
  const void* data;    // nullptr when no winner can be a tie
  const void* output;  // likewise
  void* d_data;        // [batch, rows, features]
  bool d_output_is_shared;  // leading dimension 1, shared by the batch; the same for winner (and output)
  bool winner_is_shared;
};

// How LaunchExtremumBackward runs; `shares_ties`: with data and output.
Plan PlanExtremumBackward(const Problem& problem, int64_t element_bytes, bool has_order, bool shares_ties);

CudaStatus LaunchExtremumBackward(const ExtremumBackwardArguments& arguments, cudaStream_t stream);

// How LaunchArg runs.
Plan PlanArg(const Problem& problem, int64_t element_bytes, bool indices_are_sorted);

struct ArgArguments {
  Problem problem;
  ElementType type;  // 32 or 64 bits, or floating
  bool ids_are_64_bit;
  bool indices_are_sorted;
  bool is_minimum;
  const void* data;
  const void* segment_ids;
  int32_t* row;
  void* scratch;
  int64_t scratch_bytes;
};

// The first row that attains each cell's maximum; the number of rows for an empty segment.
CudaStatus LaunchArg(const ArgArguments& arguments, cudaStream_t stream);

}  // namespace jax_baracuda::segment
