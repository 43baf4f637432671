// Shared by the CUDA handlers of the segment ops.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/decoding.h"
#include "ffi/segment/engine/strategies.h"

namespace jax_baracuda::segment {

template <auto kCallOf>
Plan CudaPlanOf(const PlanParameters& parameters) {
  return kCallOf(parameters).CudaPlan();
}

// Decodes the scratch and launches the kernels. The launch plans the call, and fails if its scratch is too small.
template <typename Call>
ffi::Error RunOnCuda(cudaStream_t stream, const OptionalResults& results, Call* call) {
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(results, /*needed_bytes=*/0, &scratch));
  call->scratch = scratch.data;
  call->scratch_bytes = scratch.bytes;
  const CudaStatus status = call->LaunchOnCuda(stream);
  if (!status.ok()) JB_RETURN_IF_ERROR(CheckScratch(results.op(), scratch, call->CudaPlan().scratch_bytes));
  return ToError(results.op(), status);
}

// The same for edges, which must be sorted by segment.
template <typename Call>
ffi::Error RunSortedOnCuda(cudaStream_t stream, const OptionalResults& results, Call* call) {
  JB_RETURN_IF_ERROR(CheckSorted(results.op(), *call));
  return RunOnCuda(stream, results, call);
}

}  // namespace jax_baracuda::segment
