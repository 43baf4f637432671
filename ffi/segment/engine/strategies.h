// What the CUDA handlers of the segment ops share.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_handler.h"
#include "ffi/segment/decoding.h"

// The names that StrategyName of reduce.cuh and PlanMapRows of map_rows.cuh give.
#define JB_REDUCE_STRATEGIES "fill", "private_table", "runs", "tiles", "staged_tiles", "sort_then_tiles"
#define JB_MAP_ROWS_STRATEGIES "row_vectors", "flat_vectors", "flat_elements"

namespace jax_baracuda::segment {

inline int64_t ElementBytes(const ffi::AnyBuffer& buffer) {
  return static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
}

}  // namespace jax_baracuda::segment
