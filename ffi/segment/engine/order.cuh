// Bringing rows into the order of their segments.
#pragma once

#include "ffi/core/cuda_status.h"
#include "ffi/segment/engine/radix_sort.cuh"

namespace jax_baracuda::segment {

inline bool OrderFits(const Problem& problem) {
  return problem.batch * problem.rows < kDropped && problem.batch * problem.segments < kDropped;
}

// Where each element of the batch has no more rows, blocks sort them for themselves, in one launch.
inline constexpr int64_t kMaxOneBlockRows = int64_t{1} << 14;

inline bool FitsOneBlock(const Problem& problem) {
  return problem.rows <= kMaxOneBlockRows && problem.batch <= 0x7fffffff;
}

// Writes what LaunchRowOrder writes, of a problem that FitsOneBlock.
CudaStatus LaunchOneBlockOrder(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, int32_t* order,
                               int32_t* sorted_ids, cudaStream_t stream);

// `holds_order` is whether the order itself lies in the scratch, too.
int64_t SegmentOrderScratchBytes(const Problem& problem, bool holds_order);

// `scratch` is 256-byte aligned and holds SegmentOrderScratchBytes. The order comes where both pointers of `order` point
// to, or lies in the scratch where they are nullptr: it tells where.
CudaStatus LaunchSegmentOrder(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, char* scratch,
                              SegmentOrder* order, cudaStream_t stream);

// Writes the order of each element's own rows, numbered within the element, [batch, rows]: a permutation of them that
// brings segments together, those that are dropped last. And the segments in this order, unless `sorted_ids` is nullptr,
// with the number of segments for rows that are dropped.
CudaStatus LaunchRowOrder(const Problem& problem, const SegmentOrder& order, int32_t* row_order, int32_t* sorted_ids,
                          cudaStream_t stream);

// Writes the order of rows as they lie, 0 ... rows - 1 for each element of the batch.
CudaStatus LaunchNaturalOrder(const Problem& problem, int32_t* order, cudaStream_t stream);

}  // namespace jax_baracuda::segment
