#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "ffi/segment/scratch.h"
#include "ffi/segment/segment_max_order.cuh"

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

// A counting sort places each row by one atomic; it wins while the places to write to lie in L2 together. Radix passes,
// which write in bursts, take over for more rows, and where counting segments would cost more than sorting rows.
bool SortsByCounting(const Problem& problem) {
  const int64_t total_rows = problem.batch * problem.rows, total_segments = problem.batch * problem.segments;
  return total_rows <= (int64_t{1} << 22) && total_segments <= 8 * total_rows;
}

// Upper bounds of what CUB asks for; checked against its answer at launch.
int64_t CubScanBytes(int64_t items) { return (int64_t{1} << 20) + items / 16; }
int64_t CubSortBytes(int64_t items) { return (int64_t{1} << 20) + items / 4; }

__global__ void __launch_bounds__(kThreads) RankKernel(const __grid_constant__ JoinedRows joined, uint32_t* counts,
                                                       uint32_t* ranks) {
  const uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= joined.total) return;
  const uint32_t segment = joined.Segment(row);
  // One atomic for all rows of the warp that share a segment, so that a hot segment does not queue up.
  const uint32_t peers = __match_any_sync(__activemask(), segment);
  const int lane = threadIdx.x % 32, leader = __ffs(peers) - 1;
  uint32_t first = 0;
  if (lane == leader) first = atomicAdd(counts + segment, __popc(peers));
  ranks[row] = __shfl_sync(peers, first, leader) + __popc(peers & ((1u << lane) - 1));
}

__global__ void __launch_bounds__(kThreads) PlaceKernel(const __grid_constant__ JoinedRows joined,
                                                        const uint32_t* offsets, const uint32_t* ranks,
                                                        SegmentOrder order) {
  const uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= joined.total) return;
  const uint32_t segment = joined.Segment(row);
  const uint32_t place = offsets[segment] + ranks[row];
  order.segments[place] = segment;
  order.rows[place] = row;
}

__global__ void __launch_bounds__(kThreads) NumberRowsKernel(const __grid_constant__ JoinedRows joined,
                                                             SegmentOrder order) {
  const uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= joined.total) return;
  order.segments[row] = joined.Segment(row);
  order.rows[row] = row;
}

}  // namespace

int64_t SegmentOrderScratchBytes(const Problem& problem) {
  const int64_t rows = problem.batch * problem.rows, counts = problem.batch * problem.segments + 1;
  ScratchSizes sizes;
  if (SortsByCounting(problem)) {
    for (int i = 0; i < 3; ++i) sizes.Add(rows * sizeof(uint32_t));
    sizes.Add(counts * sizeof(uint32_t));
    sizes.Add(CubScanBytes(counts));
  } else {
    for (int i = 0; i < 4; ++i) sizes.Add(rows * sizeof(uint32_t));
    sizes.Add(CubSortBytes(rows));
  }
  return sizes.total;
}

cudaError_t LaunchSegmentOrder(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, char* scratch,
                               SegmentOrder* order, cudaStream_t stream) {
  const int64_t rows = problem.batch * problem.rows, counts = problem.batch * problem.segments + 1;
  const JoinedRows joined{{segment_ids, ids_are_64_bit, problem.segments},
                          static_cast<uint32_t>(problem.rows),
                          static_cast<uint32_t>(rows),
                          static_cast<uint32_t>(counts - 1),
                          problem.ids_are_shared};
  const uint32_t blocks = static_cast<uint32_t>(CeilDivide(rows, kThreads));
  ScratchCarver carver(scratch);
  order->segments = carver.Take<uint32_t>(rows);
  order->rows = carver.Take<uint32_t>(rows);

  if (SortsByCounting(problem)) {
    uint32_t* ranks = carver.Take<uint32_t>(rows);
    uint32_t* offsets = carver.Take<uint32_t>(counts);
    char* cub_scratch = carver.Take<char>(CubScanBytes(counts));
    if (cudaError_t e = cudaMemsetAsync(offsets, 0, counts * sizeof(uint32_t), stream)) return e;
    RankKernel<<<blocks, kThreads, 0, stream>>>(joined, offsets, ranks);
    if (cudaError_t e = cudaGetLastError()) return e;
    size_t needed = 0;
    if (cudaError_t e = cub::DeviceScan::ExclusiveSum(nullptr, needed, offsets, offsets, counts, stream)) return e;
    if (static_cast<int64_t>(needed) > CubScanBytes(counts)) return cudaErrorInvalidValue;
    if (cudaError_t e = cub::DeviceScan::ExclusiveSum(cub_scratch, needed, offsets, offsets, counts, stream)) return e;
    PlaceKernel<<<blocks, kThreads, 0, stream>>>(joined, offsets, ranks, *order);
    return cudaGetLastError();
  }

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

}  // namespace jax_baracuda::segment
