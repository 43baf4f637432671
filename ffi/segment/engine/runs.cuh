// Reduction of narrow sorted rows: whole rows per thread.
//
// A block reduces a tile of rows, and each thread some neighbouring rows of it. Rows pass through shared memory, so
// that loads are coalesced, unless a thread's rows span no more than two sectors. A thread finishes the runs (rows of
// one segment) that begin and end within its rows. A segmented scan over the block combines the others. At most two
// runs cross the ends of the tile; they become a carry-in and a carry-out, which MergeCarries of tiles.cuh folds.
#pragma once

#include <cuda_pipeline.h>

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/tiles.cuh"

namespace jax_baracuda::segment {

inline constexpr int kRunThreads = 128;

// Rows per thread; their bytes are a multiple of 16.
template <int kFeatures>
inline constexpr int kRunRows = kFeatures <= 2 ? 16 : 8;

// Whether a row is one vector, and tiles are aligned.
inline bool UsesRuns(const Problem& problem, int64_t element_bytes) {
  const int64_t features = problem.features, row_bytes = features * element_bytes;
  const bool is_vector = features == 1 || features == 2 || features == 4 || features == 8;
  const bool is_aligned = problem.batch == 1 || problem.data_is_shared || problem.rows * row_bytes % 16 == 0;
  return is_vector && row_bytes <= 32 && is_aligned;
}

inline int64_t RunBlockRows(int64_t features) { return kRunThreads * (features <= 2 ? kRunRows<1> : kRunRows<8>); }

template <typename Reduction, int kFeatures>
struct RunShared {
  using T = typename Reduction::Element;
  using Cells = typename Reduction::template Accumulator<kFeatures>;
  static constexpr int kRows = kRunRows<kFeatures>;
  static constexpr int kThreadBytes = kRows * kFeatures * static_cast<int>(sizeof(T));
  static constexpr int kThreadWords = kThreadBytes / 16;
  static constexpr bool kStagesRows = kThreadBytes > 64;
  static constexpr int kWarps = kRunThreads / 32;
  static_assert(kThreadBytes % 16 == 0);

  // Padded to avoid bank conflicts between threads that read their k-th row.
  uint4 rows[kStagesRows ? kRunThreads : 1][kThreadWords + 1];
  Cells warp_cells[kWarps];
  bool warp_has_start[kWarps];
};

// The accumulator of another lane of the warp.
template <typename Cells>
__device__ __forceinline__ Cells ShuffleUp(const Cells& cells, int step) {
  constexpr int kWords = CeilDivide(sizeof(Cells), 4);
  uint32_t words[kWords] = {};
  memcpy(words, &cells, sizeof(cells));
#pragma unroll
  for (uint32_t& word : words) word = __shfl_up_sync(kFullWarp, word, step);
  Cells other;
  memcpy(&other, words, sizeof(other));
  return other;
}

template <typename Reduction, int kFeatures>
__global__ void __launch_bounds__(kRunThreads) RunKernel(const __grid_constant__ TileArguments<Reduction> a) {
  using T = typename Reduction::Element;
  using Shared = RunShared<Reduction, kFeatures>;
  using Cells = typename Shared::Cells;
  constexpr int kRows = Shared::kRows;
  constexpr int kBlockRows = kRunThreads * kRows;
  __shared__ Shared shared;
  PrepareMerge(a);
  if (blockIdx.x < a.gap_blocks) {
    FillWideGaps<Reduction, kFeatures>(a);
    return;
  }

  const uint32_t block = blockIdx.x - a.gap_blocks;
  const int64_t b = block / a.blocks_per_batch;
  const int64_t first_row = (block - b * a.blocks_per_batch) * kBlockRows;
  const int rows = static_cast<int>(min(a.problem.rows - first_row, static_cast<int64_t>(kBlockRows)));
  const int64_t first_id = (a.problem.ids_are_shared ? 0 : b * a.problem.rows) + first_row;
  const T* data = a.data + ((a.problem.data_is_shared ? 0 : b * a.problem.rows) + first_row) * kFeatures;
  const int64_t first_segment = a.first_segment + b * a.problem.segments;

  if constexpr (Shared::kStagesRows) {
    constexpr int kThreadWords = Shared::kThreadWords, kThreadElements = kRows * kFeatures;
    const int elements = rows * kFeatures, words = elements * static_cast<int>(sizeof(T)) / 16;
    for (int word = threadIdx.x; word < words; word += kRunThreads) {
      __pipeline_memcpy_async(&shared.rows[word / kThreadWords][word % kThreadWords],
                              reinterpret_cast<const uint4*>(data) + word, 16);
    }
    __pipeline_commit();
    for (int i = words * 16 / static_cast<int>(sizeof(T)) + threadIdx.x; i < elements; i += kRunThreads) {
      reinterpret_cast<T*>(shared.rows[i / kThreadElements])[i % kThreadElements] = data[i];
    }
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_own = static_cast<int>(threadIdx.x) * kRows;
  const int own_rows = min(max(rows - first_own, 0), kRows);
  uint32_t segments[kRows];
#pragma unroll
  for (uint32_t& own : segments) own = kDropped;
  if (own_rows > 0) {
    a.ids.template LoadRun<kRows>(first_id + first_own, own_rows,
                                  [&](int r, uint32_t own) { segments[r] = r < own_rows ? own : kDropped; });
  }
  const bool is_first_block = first_row == 0, is_last_block = first_row + rows == a.problem.rows;
  uint32_t segment = __shfl_up_sync(kFullWarp, segments[kRows - 1], 1);  // segment of the previous row
  if (lane == 0) segment = own_rows > 0 && first_row + first_own > 0 ? a.ids[first_id + first_own - 1] : kDropped;
  const bool block_is_entered = !is_first_block && segments[0] == segment;  // valid in the first thread only
  Vector<T, kFeatures> own_data[Shared::kStagesRows ? 1 : kRows];
  if constexpr (Shared::kStagesRows) {
    __pipeline_wait_prior(0);
    __syncthreads();
  } else if (own_rows == kRows) {
    uint4 words[Shared::kThreadWords];
#pragma unroll
    for (int i = 0; i < Shared::kThreadWords; ++i) {
      words[i] = __ldcs(reinterpret_cast<const uint4*>(data + first_own * kFeatures) + i);
    }
    memcpy(own_data, words, sizeof(words));
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < own_rows) own_data[r] = LoadVector<kFeatures>(data + (first_own + r) * kFeatures);
    }
  }

  // Rows up to the thread's first start belong to a run of earlier threads; `head` is their partial result.
  uint32_t carry_in_segment = kDropped;
  uint32_t gaps = 0;  // bit mask: rows that follow a narrow gap
  bool has_start = false;
  Cells cells, head;
  cells.Start();
  head.Start();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= own_rows) break;
    const uint32_t next = segments[r];
    if (next != segment || (is_first_block && threadIdx.x == 0 && r == 0)) {
      if (!has_start) {
        head = cells;
        carry_in_segment = segment;
        has_start = true;
      } else if (segment != kDropped) {
        cells.Store(a.outputs, first_segment + segment, kFeatures, 0);
      }
      gaps |= static_cast<uint32_t>(IsNarrowGap(segment, next)) << r;
      segment = next;
      cells.Start();
    }
    Vector<T, kFeatures> values;
    if constexpr (Shared::kStagesRows) {
      values = LoadVector<kFeatures>(reinterpret_cast<const T*>(shared.rows[threadIdx.x]) + r * kFeatures);
    } else {
      values = own_data[r];
    }
    cells.Add(values, static_cast<int32_t>(first_row) + first_own + r, a.outputs);
  }

  // Outside the loop over rows, which is unrolled and would outgrow the instruction cache. Therefore the ids are read
  // again.
  for (gaps = a.gap_blocks == 0 ? 0 : gaps; gaps != 0; gaps &= gaps - 1) {
    const int64_t id = first_id + first_own + __ffs(gaps) - 1;
    const int64_t begin = first_segment + a.ids[id - 1] + 1, end = first_segment + a.ids[id];
    FillGap<Reduction, kFeatures>(a.outputs, begin, end, kFeatures, 0);
  }

  // Scans the last run of each thread over the warp, then over the earlier warps.
  Cells scanned = cells;
  bool scanned_start = has_start;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    Cells earlier = ShuffleUp(scanned, step);
    const bool earlier_start = __shfl_up_sync(kFullWarp, scanned_start, step);
    if (lane >= step && !scanned_start) {
      earlier.Merge(scanned, a.outputs);
      scanned = earlier;
      scanned_start = earlier_start;
    }
  }
  if (lane == 31) {
    shared.warp_cells[warp] = scanned;
    shared.warp_has_start[warp] = scanned_start;
  }
  Cells entering = ShuffleUp(scanned, 1);
  bool entering_start = __shfl_up_sync(kFullWarp, scanned_start, 1);  // whether the entering run starts in this block
  if (lane == 0) {
    entering.Start();
    entering_start = false;
  }
  __syncthreads();
  for (int w = warp - 1; w >= 0 && !entering_start; --w) {
    Cells earlier = shared.warp_cells[w];
    earlier.Merge(entering, a.outputs);
    entering = earlier;
    entering_start = shared.warp_has_start[w];
  }

  Cells* const block_head = static_cast<Cells*>(a.carries.in) + block;
  if (threadIdx.x == 0) a.carries.in_segment[block] = block_is_entered ? segments[0] : kDropped;
  if (has_start) {
    entering.Merge(head, a.outputs);
    if (!entering_start) {
      // The block's first start. If it is the first row, no run enters, and this value is never read.
      *block_head = entering;
    } else if (carry_in_segment != kDropped) {
      entering.Store(a.outputs, first_segment + carry_in_segment, kFeatures, 0);
    }
  }
  if (static_cast<int>(threadIdx.x) == (rows - 1) / kRows && segment != kDropped) {
    if (!has_start) {
      entering.Merge(cells, a.outputs);
      cells = entering;
    }
    if (!has_start && !entering_start) {
      *block_head = cells;
    } else if (!is_last_block && a.ids[first_id + rows] == segment) {
      static_cast<Cells*>(a.carries.out)[block] = cells;
    } else {
      cells.Store(a.outputs, first_segment + segment, kFeatures, 0);
    }
  }
}

}  // namespace jax_baracuda::segment
