// Launchers of the CUDA kernels of segment_softmax and its gradient, callable from plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/core/element_type.h"
#include "ffi/core/plan.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// How LaunchSoftmax, or LaunchSoftmaxBackward, runs. Scratch memory depends on the shapes and flags alone, the strategy
// also on the number of multiprocessors.
Plan PlanSoftmax(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool deterministic,
                 bool is_backward);

struct SoftmaxArguments {
  Problem problem;
  ElementType type;  // a floating type
  bool ids_are_64_bit;
  bool indices_are_sorted;
  bool deterministic;
  const void* logits;
  const void* segment_ids;
  void* probabilities;
  void* scratch;
  int64_t scratch_bytes;
};

// Writes every element of probabilities. Enqueues work on `stream` only: no allocation, no synchronisation, the same
// launches whenever the problem is the same.
CudaStatus LaunchSoftmax(const SoftmaxArguments& arguments, cudaStream_t stream);

struct SoftmaxBackwardArguments {
  Problem problem;  // data_is_shared is that of probabilities
  ElementType type;
  bool ids_are_64_bit;
  bool indices_are_sorted;
  bool deterministic;
  bool d_probabilities_are_shared;
  const void* probabilities;
  const void* d_probabilities;
  const void* segment_ids;
  void* d_logits;
  void* scratch;
  int64_t scratch_bytes;
};

// As LaunchSoftmax.
CudaStatus LaunchSoftmaxBackward(const SoftmaxBackwardArguments& arguments, cudaStream_t stream);

}  // namespace jax_baracuda::segment
