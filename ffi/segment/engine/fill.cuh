// Fills all results with the reduction of no rows, before any rows are reduced.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/reduction.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

inline constexpr int kFillThreads = 256;

// If most segments are empty, filling all results at memory bandwidth and overwriting the non-empty ones is faster than
// finding and filling each gap.
inline bool FillsFirst(const Problem& problem) {
  return problem.segments / Tuning::kMinFilledSegmentsToRow >= problem.rows &&
         problem.NumCells() >= Tuning::kMinFilledElements;
}

// Writes the reduction of no rows to `count` vectors of each segment from `first` on.
template <typename Reduction, int kVec>
__global__ void __launch_bounds__(kFillThreads)
    FillKernel(const __grid_constant__ typename Reduction::Outputs outputs, int64_t first, int64_t features,
               int64_t segments, int64_t count) {
  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
  if (i >= segments * count) return;
  const int64_t segment = segments == 1 ? 0 : i / count;
  nothing.Store(outputs, first + segment, features, (i - segment * count) * kVec);
}

// Writes the reduction of no rows to `segments` segments from `first` on.
template <typename Reduction>
CudaStatus LaunchFill(const typename Reduction::Outputs& outputs, int64_t first, int64_t segments, int64_t features,
                      cudaStream_t stream) {
  // If the results hold exactly one element per cell, all cells can be filled as one wide segment.
  const bool is_flat = kStoresCellsAlone<Reduction>;
  const int64_t width = is_flat ? segments * features : features, rows = is_flat ? 1 : segments;
  // The widest vector that divides both the number of cells to fill and the number of cells before them.
  return DispatchRowVector<typename Reduction::Element>(width | (first * features), [&](auto vector) {
    constexpr int kVec = decltype(vector)::value;
    const int64_t count = width / kVec;
    FillKernel<Reduction, kVec><<<GridSize(CeilDivide(rows * count, kFillThreads)), kFillThreads, 0, stream>>>(
        outputs, first, features, rows, count);
    return JB_LAUNCH_STATUS(FillKernel);
  });
}

}  // namespace jax_baracuda::segment
