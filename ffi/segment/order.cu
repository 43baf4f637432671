#include <cub/device/device_radix_sort.cuh>

#include "ffi/core/scratch.h"
#include "ffi/segment/order.cuh"

namespace jax_baracuda::segment {
namespace {

constexpr int kThreads = 256;

struct JoinedRows {
  SegmentIds ids;
  uint32_t rows;   // of one element of the batch
  uint32_t total;  // of the whole batch
  uint32_t dropped;
  bool ids_are_shared;

  __device__ uint32_t Segment(uint32_t joined_row) const {
    const bool is_batched = total != rows;
    const uint32_t b = is_batched ? joined_row / rows : 0;
    const uint32_t segment = ids[ids_are_shared ? joined_row - b * rows : joined_row];
    return segment == kDropped ? dropped : b * static_cast<uint32_t>(ids.segments) + segment;
  }
};

// An upper bound of what CUB asks for, known without a GPU; checked against CUB's answer at launch.
int64_t CubSortBytes(int64_t items) { return (int64_t{1} << 20) + items / 4; }

__global__ void __launch_bounds__(kThreads) NumberRowsKernel(const __grid_constant__ JoinedRows joined,
                                                             SegmentOrder order) {
  const uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= joined.total) return;
  order.segments[row] = joined.Segment(row);
  order.rows[row] = row;
}

__global__ void __launch_bounds__(kThreads) NaturalOrderKernel(int32_t* order, int64_t rows, int64_t total) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < total) order[i] = static_cast<int32_t>(i % rows);
}

}  // namespace

int64_t SegmentOrderScratchBytes(const Problem& problem) {
  const int64_t rows = problem.batch * problem.rows;
  ScratchSizes sizes;
  for (int i = 0; i < 4; ++i) sizes.Add(rows * sizeof(uint32_t));
  sizes.Add(CubSortBytes(rows));
  return sizes.total;
}

cudaError_t LaunchSegmentOrder(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, char* scratch,
                               SegmentOrder* order, cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.rows;
  const JoinedRows joined{{segment_ids, ids_are_64_bit, problem.segments},
                          static_cast<uint32_t>(problem.rows),
                          static_cast<uint32_t>(rows),
                          static_cast<uint32_t>(problem.batch * problem.segments),
                          problem.ids_are_shared};
  const uint32_t blocks = static_cast<uint32_t>(CeilDivide(rows, kThreads));
  ScratchCarver carver(scratch);
  order->segments = carver.Take<uint32_t>(rows);
  order->rows = carver.Take<uint32_t>(rows);
  cub::DoubleBuffer<uint32_t> keys(order->segments, carver.Take<uint32_t>(rows));
  cub::DoubleBuffer<uint32_t> values(order->rows, carver.Take<uint32_t>(rows));
  char* cub_scratch = carver.Take<char>(CubSortBytes(rows));
  NumberRowsKernel<<<blocks, kThreads, 0, stream>>>(joined, *order);
  if (cudaError_t e = cudaGetLastError()) return e;
  int end_bit = 1;
  while ((joined.dropped >> end_bit) != 0) ++end_bit;
  size_t needed = 0;
  const uint32_t items = joined.total;
  if (cudaError_t e = cub::DeviceRadixSort::SortPairs(nullptr, needed, keys, values, items, 0, end_bit, stream)) {
    return e;
  }
  if (static_cast<int64_t>(needed) > CubSortBytes(rows)) return cudaErrorInvalidValue;
  if (cudaError_t e = cub::DeviceRadixSort::SortPairs(cub_scratch, needed, keys, values, items, 0, end_bit, stream)) {
    return e;
  }
  *order = {keys.Current(), values.Current()};
  return cudaSuccess;
}

cudaError_t LaunchNaturalOrder(const Problem& problem, int32_t* order, cudaStream_t stream) {
  const int64_t total = problem.batch * problem.rows;
  if (total == 0) return cudaSuccess;
  NaturalOrderKernel<<<static_cast<uint32_t>(CeilDivide(total, kThreads)), kThreads, 0, stream>>>(order, problem.rows,
                                                                                                total);
  return cudaGetLastError();
}

}  // namespace jax_baracuda::segment
