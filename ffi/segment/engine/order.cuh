// Sorts rows by segment.
#pragma once

#include "ffi/core/cuda_status.h"
#include "ffi/segment/engine/radix_sort.cuh"

namespace jax_baracuda::segment {

// Whether the rows of the whole batch can be sorted together: they are counted in 31 bits, and segments in 32.
inline bool OrderFits(const Problem& problem) {
  return problem.batch * problem.rows < (int64_t{1} << 31) && problem.batch * problem.segments < kDropped;
}

// Whether unsorted rows are so few that one launch sorts them (see sort_few_rows.cuh). Numbers of rows have 16 bits in
// shared memory. Without a batch, at most two blocks per multiprocessor, of 256 segments each, read all ids.
inline bool UsesFewUnsortedRows(const Problem& problem) {
  constexpr int64_t kMaxRows = int64_t{1} << 14, kMaxSegments = int64_t{1} << 16;
  return problem.rows <= kMaxRows && problem.batch * problem.segments <= kMaxSegments;
}

// Writes the same as LaunchRowOrder, for a problem that UsesFewUnsortedRows.
CudaStatus LaunchFewRowOrder(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, int32_t* order,
                             int32_t* sorted_ids, cudaStream_t stream);

// `holds_order`: whether the scratch also holds the resulting order.
int64_t SegmentOrderScratchBytes(const Problem& problem, bool holds_order);

// `scratch` is 256-byte aligned and holds SegmentOrderScratchBytes. The result goes to the arrays of `order`, or into
// the scratch if its pointers are nullptr; they are then set to it.
CudaStatus LaunchSegmentOrder(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, char* scratch,
                              SegmentOrder* order, cudaStream_t stream);

// Writes a permutation of each batch element's rows, [batch, rows], numbered within the element. It groups rows by
// segment; dropped rows come last. Also writes the segments in this order, with the number of segments for dropped
// rows.
CudaStatus LaunchRowOrder(const Problem& problem, const SegmentOrder& order, int32_t* row_order, int32_t* sorted_ids,
                          cudaStream_t stream);

}  // namespace jax_baracuda::segment
