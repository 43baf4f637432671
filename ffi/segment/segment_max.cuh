// Launchers of the CUDA kernels of segment_max, callable from plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/element_type.h"
#include "ffi/segment/segment_max.h"

namespace jax_baracuda::segment {

// Bytes of scratch memory that LaunchSegmentMax needs. Depends on the shapes and flags alone; calls no CUDA function.
int64_t SegmentMaxScratchBytes(const Problem& problem, int64_t element_bytes, bool indices_are_sorted,
                               bool with_winner);

struct SegmentMaxArguments {
  Problem problem;
  ElementType type;
  bool ids_are_64_bit;
  bool indices_are_sorted;
  bool first_wins;
  const void* data;
  const void* segment_ids;
  void* output;
  int32_t* winner;  // nullptr when only the maximum is wanted
  void* scratch;
  int64_t scratch_bytes;
};

// Writes every element of output (and winner). Enqueues work on `stream` only: no allocation, no synchronisation, the
// same launches whenever the problem is the same.
cudaError_t LaunchSegmentMax(const SegmentMaxArguments& arguments, cudaStream_t stream);

struct SegmentMaxBackwardArguments {
  Problem problem;
  ElementType type;  // a floating type
  bool ids_are_64_bit;
  const void* d_output;
  const int32_t* winner;
  const void* segment_ids;
  const void* data;    // nullptr when no winner can be a tie
  const void* output;  // likewise
  void* d_data;        // [batch, rows, features]
  bool d_output_is_shared;  // leading dimension 1, shared by the batch; the same for winner (and output)
  bool winner_is_shared;
};

cudaError_t LaunchSegmentMaxBackward(const SegmentMaxBackwardArguments& arguments, cudaStream_t stream);

}  // namespace jax_baracuda::segment
