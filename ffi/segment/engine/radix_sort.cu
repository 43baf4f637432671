// LSD radix sort with decoupled look-back, one pass over the rows per digit (Adinets and Merrill, "Onesweep", 2022).
// CUB's pair sort has 8-bit digits and needs segments and row numbers in memory. This one has 9-bit digits, and its
// first pass reads the ids directly.
#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <cuda/atomic>

#include "ffi/core/device_attributes.h"
#include "ffi/core/scratch.h"
#include "ffi/segment/engine/radix_sort.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {
namespace {

constexpr int kDigitBits = 9;
constexpr int kBins = 1 << kDigitBits;
constexpr int kMaxPasses = 4;

constexpr int kThreads = kBins;  // one bin per thread
constexpr int kWarps = kThreads / 32;

// The status of a bin in a tile: 0, then the number of the tile's rows plus 1, then the number of rows of all tiles up to
// this one with the highest bit set.
constexpr uint32_t kOfTilesSoFar = 1u << 31;
constexpr int kLookBack = 4;  // tiles read per look-back step

struct Digit {
  int first_bit, bits;

  __device__ __forceinline__ uint32_t Of(uint32_t segment) const { return (segment >> first_bit) & ((1u << bits) - 1); }
};

struct Counts {
  uint32_t rows[kMaxPasses][kBins];  // per digit and bin
  uint32_t tiles[kMaxPasses];        // started, per pass
};

constexpr int kCountThreads = 1024;
constexpr int kCountRows = 8;  // in flight per thread

struct Passes {
  int count, bits;

  __host__ __device__ Digit operator[](int pass) const { return {pass * bits, bits}; }
};

// Builds the histograms of all digits, and clears the status words of the tiles.
__global__ void __launch_bounds__(kCountThreads)
    CountDigitsKernel(const __grid_constant__ JoinedRows joined, Passes passes, Counts* counts, uint4* statuses,
                      int64_t status_vectors) {
  __shared__ uint32_t block_rows[kMaxPasses][kBins];
  for (int i = threadIdx.x; i < passes.count * kBins; i += kCountThreads) block_rows[0][i] = 0;
  __syncthreads();
  constexpr int kBlockRows = kCountThreads * kCountRows;
  for (int64_t first = int64_t{blockIdx.x} * kBlockRows; first < joined.total;
       first += int64_t{gridDim.x} * kBlockRows) {
    uint32_t segments[kCountRows];
    const int rows = static_cast<int>(min(int64_t{kBlockRows}, joined.total - first));
    joined.Load(static_cast<uint32_t>(first), threadIdx.x, kCountThreads, rows, segments);
#pragma unroll
    for (int i = 0; i < kCountRows; ++i) {
      if (segments[i] == kDropped) continue;
      for (int pass = 0; pass < passes.count; ++pass) atomicAdd(&block_rows[pass][passes[pass].Of(segments[i])], 1);
    }
  }
  for (int64_t i = int64_t{blockIdx.x} * kCountThreads + threadIdx.x; i < status_vectors;
       i += int64_t{gridDim.x} * kCountThreads) {
    statuses[i] = uint4{};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < passes.count * kBins; i += kCountThreads) {
    if (block_rows[0][i] != 0) atomicAdd(&counts->rows[0][i], block_rows[0][i]);
  }
}

template <int kItems>
struct alignas(16) TileMemory {
  union {
    struct {
      uint32_t peers[kWarps][kBins];  // bit mask of the lanes whose row is in the bin
      uint16_t rows[kWarps][kBins];   // count over the warp's steps so far; later over earlier warps
    } ranking;
    struct {
      uint32_t segments[kItems * kThreads], rows[kItems * kThreads];
    } sorted;
  };
  uint32_t begin[kBins];  // first position of the bin in the tile
  uint32_t shift[kBins];  // from a position in the tile to the global position
  typename cub::BlockScan<uint32_t, kThreads>::TempStorage scan;
  uint32_t tile;
};

using Status = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

__device__ __forceinline__ uint32_t LoadStatus(uint32_t* status) {
  return Status(*status).load(cuda::memory_order_relaxed);
}

__device__ __forceinline__ void Publish(uint32_t* status, uint32_t value) {
  Status(*status).store(value, cuda::memory_order_relaxed);
}

// The number of rows of a bin in all earlier tiles. Those tiles have started and publish their own counts without
// waiting, so the loop ends.
__device__ __forceinline__ uint32_t RowsOfTilesBefore(int64_t tile, uint32_t* bin_statuses) {
  uint32_t rows = 0;
  int64_t next = tile - 1;
  while (next >= 0) {
    uint32_t statuses[kLookBack];
#pragma unroll
    for (int i = 0; i < kLookBack; ++i) statuses[i] = i <= next ? LoadStatus(bin_statuses + (next - i) * kBins) : 0;
    int known = 0;
#pragma unroll
    for (int i = 0; i < kLookBack; ++i) {
      if (known < i || statuses[i] == 0) continue;
      if (statuses[i] >= kOfTilesSoFar) return rows + (statuses[i] - kOfTilesSoFar);
      rows += statuses[i] - 1;
      ++known;
    }
    next -= known;
    if (known < kLookBack) {
      while (LoadStatus(bin_statuses + next * kBins) == 0) __nanosleep(40);
    }
  }
  return rows;
}

// Sorts one tile by one digit, with kItems rows per thread. Each warp has neighbouring rows.
template <int kItems, bool kReadsIds>
__global__ void __launch_bounds__(kThreads, kItems > 16 ? 1 : 2)
    SortDigitKernel(const __grid_constant__ JoinedRows joined, SegmentOrder from, SegmentOrder to, Digit digit,
                    const uint32_t* rows_of_bins, uint32_t* statuses, uint32_t* tiles_begun) {
  constexpr int kTileRows = kItems * kThreads;
  static_assert(kTileRows < 1 << 16);  // ranks are 16-bit
  extern __shared__ uint4 dynamic_memory[];
  auto& memory = *reinterpret_cast<TileMemory<kItems>*>(dynamic_memory);
  auto& ranking = memory.ranking;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t bin_rows_of_all = __ldg(rows_of_bins + threadIdx.x);
  if (threadIdx.x == 0) memory.tile = atomicAdd(tiles_begun, 1);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(ranking) / sizeof(uint4)); i += kThreads) {
    reinterpret_cast<uint4*>(&ranking)[i] = uint4{};
  }
  __syncthreads();
  const uint32_t tile = memory.tile;
  const uint32_t tile_begin = tile * static_cast<uint32_t>(kTileRows);
  const int tile_rows = static_cast<int>(min(static_cast<uint32_t>(kTileRows), joined.total - tile_begin));
  const int first = warp * 32 * kItems + lane;

  uint32_t values[kItems];  // segments, then rows
  uint32_t places[kItems];  // positions in the sorted tile
  // Missing rows sort last. They affect only the last tile, whose counts no other tile reads.
  if constexpr (kReadsIds) {
    joined.Load(tile_begin, first, 32, tile_rows, values);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int row = first + i * 32;
      values[i] = row < tile_rows ? __ldcs(from.segments + tile_begin + row) : kDropped;
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t bin = digit.Of(values[i]);
    atomicOr(&ranking.peers[warp][bin], 1u << lane);
    __syncwarp();
    const uint32_t peers = ranking.peers[warp][bin];
    const uint32_t before = ranking.rows[warp][bin];
    const uint32_t rank = __popc(peers & ((1u << lane) - 1));
    __syncwarp();
    if (rank == 0) {
      ranking.rows[warp][bin] = static_cast<uint16_t>(before + __popc(peers));
      ranking.peers[warp][bin] = 0;
    }
    __syncwarp();
    places[i] = before + rank;
  }
  __syncthreads();

  const int bin = threadIdx.x;
  uint32_t bin_rows = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint32_t of_warp = ranking.rows[w][bin];
    ranking.rows[w][bin] = static_cast<uint16_t>(bin_rows);
    bin_rows += of_warp;
  }
  uint32_t* const bin_statuses = statuses + bin;
  uint32_t* const own_status = bin_statuses + int64_t{tile} * kBins;
  Publish(own_status, tile == 0 ? kOfTilesSoFar | bin_rows : bin_rows + 1);
  uint32_t begin, begin_of_all;
  cub::BlockScan<uint32_t, kThreads>(memory.scan).ExclusiveSum(bin_rows, begin);
  memory.begin[bin] = begin;
  __syncthreads();
  cub::BlockScan<uint32_t, kThreads>(memory.scan).ExclusiveSum(bin_rows_of_all, begin_of_all);

#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t bin_of_row = digit.Of(values[i]);
    places[i] += ranking.rows[warp][bin_of_row] + memory.begin[bin_of_row];
  }
  __syncthreads();  // the sorted rows share memory with the ranking
#pragma unroll
  for (int i = 0; i < kItems; ++i) memory.sorted.segments[places[i]] = values[i];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int row = first + i * 32;
    values[i] = kReadsIds ? tile_begin + row : row < tile_rows ? __ldcs(from.rows + tile_begin + row) : 0;
  }
  const uint32_t before = RowsOfTilesBefore(tile, bin_statuses);
  if (tile > 0) Publish(own_status, kOfTilesSoFar | (before + bin_rows));
  memory.shift[bin] = begin_of_all + before - begin;
#pragma unroll
  for (int i = 0; i < kItems; ++i) memory.sorted.rows[places[i]] = values[i];
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int place = i * kThreads + threadIdx.x;
    if (place >= tile_rows) continue;
    const uint32_t segment = memory.sorted.segments[place];
    const uint32_t destination = memory.shift[digit.Of(segment)] + place;
    to.segments[destination] = segment;
    to.rows[destination] = memory.sorted.rows[place];
  }
}

// Rows per thread. For few rows, small enough that all tiles are resident at once. Otherwise 20 if each multiprocessor
// then has one tile at most, and with 16 would have more.
int TileItems(int64_t rows) {
  if (rows <= Tuning::kMaxRowsOfSmallSortTiles) return 4;
  constexpr int64_t kWaveThreads = Tuning::kMultiprocessors * kThreads;
  return rows > kWaveThreads * 16 && rows <= kWaveThreads * 20 ? 20 : 16;
}

int64_t Tiles(int64_t rows) { return CeilDivide(rows, TileItems(rows) * kThreads); }

// Splits the bits evenly over the passes.
Passes PassesUpTo(uint32_t segment) {
  const int bits = BitsUpTo(segment);
  const int count = static_cast<int>(CeilDivide(bits, kDigitBits));
  return {count, static_cast<int>(CeilDivide(bits, count))};
}

int64_t StatusBytes(int64_t rows, const Passes& passes) {
  return passes.count * Tiles(rows) * kBins * static_cast<int64_t>(sizeof(uint32_t));
}

struct Sort {
  const JoinedRows& joined;
  Passes passes;
  const SegmentOrder &sorted, &other;
  Counts* counts;
  uint32_t* statuses;
  cudaStream_t stream;

  template <int kItems>
  CudaStatus Run() const {
    JB_RETURN_IF_CUDA_ERROR((RunPass<kItems, true>(0)));
    for (int pass = 1; pass < passes.count; ++pass) JB_RETURN_IF_CUDA_ERROR((RunPass<kItems, false>(pass)));
    return {};
  }

  template <int kItems, bool kReadsIds>
  CudaStatus RunPass(int pass) const {
    const auto kernel = SortDigitKernel<kItems, kReadsIds>;
    JB_RETURN_IF_CUDA_ERROR(AllowSharedMemory(kernel));
    const bool is_to_sorted = (passes.count - 1 - pass) % 2 == 0;  // the last pass must end in `sorted`
    const int64_t tiles = Tiles(joined.total);
    kernel<<<GridSize(tiles), kThreads, sizeof(TileMemory<kItems>), stream>>>(
        joined, is_to_sorted ? other : sorted, is_to_sorted ? sorted : other, passes[pass], counts->rows[pass],
        statuses + pass * tiles * kBins, counts->tiles + pass);
    return JB_LAUNCH_STATUS(SortDigitKernel);
  }
};

}  // namespace

int64_t RadixSortScratchBytes(int64_t rows, uint32_t dropped) {
  ScratchSizes sizes;
  sizes.Add(sizeof(Counts));
  sizes.Add(StatusBytes(rows, PassesUpTo(dropped)));
  return sizes.total;
}

CudaStatus LaunchRadixSort(const JoinedRows& joined, const SegmentOrder& sorted, const SegmentOrder& other,
                           char* scratch, cudaStream_t stream) {
  const Passes passes = PassesUpTo(joined.dropped);
  const int64_t status_bytes = StatusBytes(joined.total, passes);
  ScratchCarver carver(scratch);
  Counts* const counts = carver.Take<Counts>(1);
  uint32_t* const statuses = carver.Take<uint32_t>(status_bytes / sizeof(uint32_t));
  const Sort sort{joined, passes, sorted, other, counts, statuses, stream};
  JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(counts, 0, sizeof(Counts), stream));
  int multiprocessors = 0;
  JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
  const int64_t blocks = std::min<int64_t>(CeilDivide(joined.total, kCountThreads * kCountRows), 2 * multiprocessors);
  CountDigitsKernel<<<GridSize(blocks), kCountThreads, 0, stream>>>(
      joined, passes, counts, reinterpret_cast<uint4*>(statuses), status_bytes / static_cast<int64_t>(sizeof(uint4)));
  JB_RETURN_IF_LAUNCH_ERROR(CountDigitsKernel);
  switch (TileItems(joined.total)) {
    case 4:
      return sort.Run<4>();
    case 16:
      return sort.Run<16>();
    default:
      return sort.Run<20>();
  }
}

}  // namespace jax_baracuda::segment
