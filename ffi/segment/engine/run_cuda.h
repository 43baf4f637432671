// Shared by the CUDA handlers of the segment ops.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/decoding.h"

// The names returned by StrategyName in reduce.cuh and PlanMapRows in map_rows.cuh.
#define JB_REDUCE_STRATEGIES "fill", "private_table", "small_rows", "runs", "tiles", "staged_tiles", "sort_then_tiles"
#define JB_MAP_ROWS_STRATEGIES "row_vectors", "flat_vectors", "flat_elements"

namespace jax_baracuda::segment {

template <auto kCallOf>
Plan CudaPlanOf(const PlanParameters& parameters) {
  return kCallOf(parameters).CudaPlan();
}

// Decodes the scratch, and launches the kernels. The launch plans the call, and fails if its scratch is too small.
template <typename Call>
ffi::Error RunOnCuda(cudaStream_t stream, const char* op, ffi::RemainingRets scratch_result, Call* call) {
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(op, scratch_result, /*needed_bytes=*/0, &scratch));
  call->scratch = scratch.data;
  call->scratch_bytes = scratch.bytes;
  const CudaStatus status = call->LaunchOnCuda(stream);
  if (!status.ok()) JB_RETURN_IF_ERROR(CheckScratch(op, scratch, call->CudaPlan().scratch_bytes));
  return ToError(op, status);
}

// The same for edges, which must be sorted by segment.
template <typename Call>
ffi::Error RunSortedOnCuda(cudaStream_t stream, const char* op, ffi::RemainingRets scratch_result, Call* call) {
  if (!call->indices_are_sorted) {
    return InvalidArgument(op, "indices_are_sorted is false, expected true: segment_order brings edges into order");
  }
  return RunOnCuda(stream, op, scratch_result, call);
}

}  // namespace jax_baracuda::segment
