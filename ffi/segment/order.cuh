// Bringing rows into the order of their segments.
#pragma once

#include "ffi/segment/device.cuh"

namespace jax_baracuda::segment {

// Rows and segments of the whole batch, numbered through. The numbers are 32-bit: see OrderFits.
struct SegmentOrder {
  uint32_t* segments;  // ascending; batch * segments for a dropped row
  uint32_t* rows;
};

inline bool OrderFits(const Problem& problem) {
  constexpr int64_t kMost = 0xfffffffe;
  return problem.batch * problem.rows < kMost && problem.batch * problem.segments < kMost;
}

int64_t SegmentOrderScratchBytes(const Problem& problem);

// `scratch` is 256-byte aligned and holds SegmentOrderScratchBytes; the order returned lies in it.
cudaError_t LaunchSegmentOrder(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, char* scratch,
                               SegmentOrder* order, cudaStream_t stream);

// Writes the order of rows as they lie, 0 ... rows - 1 for each element of the batch.
cudaError_t LaunchNaturalOrder(const Problem& problem, int32_t* order, cudaStream_t stream);

}  // namespace jax_baracuda::segment
