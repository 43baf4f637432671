// Launchers of the CUDA kernels of segment_prod and its gradient, callable from plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/core/element_type.h"
#include "ffi/core/plan.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// How LaunchProduct runs.
Plan PlanProduct(const Problem& problem, int64_t element_bytes, bool indices_are_sorted);

struct ProductArguments {
  Problem problem;
  ElementType type;
  bool ids_are_64_bit;
  bool indices_are_sorted;
  const void* data;
  const void* segment_ids;
  void* output;
  void* mantissa;   // with `packed` the residual of the gradient (see arithmetic.h), or nullptr
  int32_t* packed;  // likewise
  void* scratch;
  int64_t scratch_bytes;
};

CudaStatus LaunchProduct(const ProductArguments& arguments, cudaStream_t stream);

struct ProductBackwardArguments {
  Problem problem;
  ElementType type;  // a floating type
  bool ids_are_64_bit;
  const void* d_output;
  const void* mantissa;
  const int32_t* packed;
  const void* data;
  const void* segment_ids;
  void* d_data;  // [batch, rows, features]
  bool d_output_is_shared;
  bool product_is_shared;
};

// How LaunchProductBackward runs.
Plan PlanProductBackward(const Problem& problem, int64_t element_bytes);

CudaStatus LaunchProductBackward(const ProductBackwardArguments& arguments, cudaStream_t stream);

}  // namespace jax_baracuda::segment
