#include "ffi/core/device_attributes.h"
#include "ffi/core/scratch.h"
#include "ffi/segment/engine/order.cuh"
#include "ffi/segment/engine/sort_few_rows.cuh"

namespace jax_baracuda::segment {
namespace {

constexpr int kThreads = 256;

// Dropped rows count as one more segment, which comes last.
__global__ void __launch_bounds__(kFewRowThreads)
    FewRowOrderKernel(SegmentIds ids, bool ids_are_shared, FewRowSorter sorter, uint32_t own_segments,
                      uint32_t blocks_per_batch, int64_t rows, int32_t* order, int32_t* sorted_ids) {
  extern __shared__ uint4 shared_memory[];
  const uint32_t b = blockIdx.x / blocks_per_batch;
  const uint32_t first_segment = (blockIdx.x - b * blocks_per_batch) * own_segments;
  const int64_t first_id = ids_are_shared ? 0 : b * rows;
  const auto segment_of = [&](int row) { return min(ids[first_id + row], static_cast<uint32_t>(ids.segments)); };
  const int before =
      sorter.Sort</*kCountsRowsBefore=*/true>(reinterpret_cast<char*>(shared_memory), first_segment, segment_of);
  const int64_t first_place = b * rows + before;
  for (int i = threadIdx.x; i < sorter.count(); i += kFewRowThreads) {
    const int row = sorter.Row(i);
    order[first_place + i] = row;
    sorted_ids[first_place + i] = static_cast<int32_t>(segment_of(row));
  }
}

constexpr int kRowsPerBlock = 16 * kThreads;

// The joined order holds the rows of a batch element in two ranges: the rows of its segments, and its rows among the
// dropped ones at the end. The sort is stable, so both ranges are already in order.
__global__ void __launch_bounds__(kThreads)
    RowOrderKernel(const SegmentOrder order, uint32_t rows, uint32_t total, uint32_t segments, uint32_t dropped,
                   uint32_t blocks_per_batch, int32_t* row_order, int32_t* sorted_ids) {
  const uint32_t b = blockIdx.x / blocks_per_batch;
  __shared__ uint32_t bounds[3];  // begin and end of the batch element's kept rows, and the first dropped row
  if (threadIdx.x < 3) {
    const uint32_t segment = threadIdx.x == 2 ? dropped : (b + threadIdx.x) * segments;
    uint32_t begin = 0, end = total;
    while (begin < end) {
      const uint32_t middle = begin + (end - begin) / 2;
      if (__ldg(order.segments + middle) < segment) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    bounds[threadIdx.x] = begin;
  }
  __syncthreads();
  const uint32_t first_row = b * rows, kept = bounds[1] - bounds[0];
  const uint32_t dropped_before = first_row - bounds[0];
  const uint32_t first = (blockIdx.x - b * blocks_per_batch) * kRowsPerBlock;
  for (uint32_t i = first + threadIdx.x; i < min(rows, first + kRowsPerBlock); i += kThreads) {
    const uint32_t place = i < kept ? bounds[0] + i : bounds[2] + dropped_before + (i - kept);
    row_order[static_cast<int64_t>(first_row) + i] = static_cast<int32_t>(order.rows[place] - first_row);
    const uint32_t segment = i < kept ? order.segments[place] - b * segments : segments;
    sorted_ids[static_cast<int64_t>(first_row) + i] = static_cast<int32_t>(segment);
  }
}

}  // namespace

int64_t SegmentOrderScratchBytes(const Problem& problem, bool holds_order) {
  const int64_t rows = problem.batch * problem.rows;
  ScratchSizes sizes;
  for (int i = 0; i < (holds_order ? 4 : 2); ++i) sizes.Add(rows * sizeof(uint32_t));
  sizes.Add(RadixSortScratchBytes(rows, static_cast<uint32_t>(problem.batch * problem.segments)));
  return sizes.total;
}

CudaStatus LaunchFewRowOrder(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, int32_t* order,
                             int32_t* sorted_ids, cudaStream_t stream) {
  const int64_t segments = problem.segments + 1;
  const int own_segments = OwnSegments(segments, problem.batch);
  const FewRowSorter sorter(static_cast<int>(problem.rows), own_segments);
  const int64_t blocks_per_batch = CeilDivide(segments, int64_t{own_segments});
  JB_RETURN_IF_CUDA_ERROR(AllowSharedMemory(FewRowOrderKernel));
  FewRowOrderKernel<<<GridSize(problem.batch * blocks_per_batch), kFewRowThreads, sorter.Bytes(), stream>>>(
      {segment_ids, ids_are_64_bit, problem.segments}, problem.ids_are_shared, sorter,
      static_cast<uint32_t>(own_segments), static_cast<uint32_t>(blocks_per_batch), problem.rows, order, sorted_ids);
  return JB_LAUNCH_STATUS(FewRowOrderKernel);
}

CudaStatus LaunchSegmentOrder(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, char* scratch,
                              SegmentOrder* order, cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.rows;
  const JoinedRows joined{{segment_ids, ids_are_64_bit, problem.segments},
                          static_cast<uint32_t>(problem.rows),
                          static_cast<uint32_t>(rows),
                          static_cast<uint32_t>(problem.batch * problem.segments),
                          problem.ids_are_shared};
  ScratchCarver carver(scratch);
  const auto take = [&] { return carver.Take<uint32_t>(rows); };
  if (order->segments == nullptr) *order = {take(), take()};
  if (problem.batch == 1 && UsesFewUnsortedRows(problem)) {
    return LaunchFewRowOrder(problem, segment_ids, ids_are_64_bit, reinterpret_cast<int32_t*>(order->rows),
                             reinterpret_cast<int32_t*>(order->segments), stream);
  }
  const SegmentOrder other{take(), take()};
  return LaunchRadixSort(joined, *order, other, carver.Take<char>(0), stream);
}

CudaStatus LaunchRowOrder(const Problem& problem, const SegmentOrder& order, int32_t* row_order, int32_t* sorted_ids,
                          cudaStream_t stream) {
  const uint32_t blocks_per_batch = static_cast<uint32_t>(CeilDivide(problem.rows, kRowsPerBlock));
  RowOrderKernel<<<GridSize(problem.batch * blocks_per_batch), kThreads, 0, stream>>>(
      order, static_cast<uint32_t>(problem.rows), static_cast<uint32_t>(problem.batch * problem.rows),
      static_cast<uint32_t>(problem.segments), static_cast<uint32_t>(problem.batch * problem.segments),
      blocks_per_batch, row_order, sorted_ids);
  return JB_LAUNCH_STATUS(RowOrderKernel);
}

}  // namespace jax_baracuda::segment
