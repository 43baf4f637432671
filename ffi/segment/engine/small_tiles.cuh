// Reduction of few gathered rows in order of their segments, in one launch that waits for memory a few times only.
//
// Rows are cut into tiles of kSmallTileRows, all of which a group of threads asks for at once. A run belongs to the
// block in which it starts: the groups of the block bring together what they have of it, and where it leaves the block
// they read on, as many rows at once as a block has, to its end. So nothing is left to merge for another kernel, but a
// hot segment keeps one block busy: see TakesSmallTiles. Partial results are merged in an order that shapes and ids alone
// decide.
//
// The first blocks of the grid fill the segments without rows. Ids that are not sorted after all give wrong results, but
// no access out of bounds and no endless work.
#pragma once

#include "ffi/segment/engine/gathering.cuh"
#include "ffi/segment/engine/tiles.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

inline constexpr int kSmallThreads = 256;
inline constexpr int kSmallTileRows = 8;
inline constexpr int kSmallBlockRows = kSmallThreads * kSmallTileRows;  // at most
inline constexpr int kFilledSegments = 1024;                          // of a block that fills

// Few rows, and on average so few to a segment that the hottest one can hardly have many.
inline bool TakesSmallTiles(const Problem& problem) {
  return problem.rows <= Tuning::kMaxRowsOfSmallTiles &&
         problem.rows / Tuning::kMaxRowsToSegmentOfSmallTiles <= problem.segments &&
         problem.batch * problem.rows * problem.features <= Tuning::kMaxElementsOfSmallTiles &&
         problem.batch * problem.segments * problem.features <= Tuning::kMaxElementsOfSmallTiles;
}

inline int64_t SmallGapBlocks(const Problem& problem) {
  return problem.batch * CeilDivide(problem.segments, static_cast<int64_t>(kFilledSegments));
}

// The first row whose id is not below `segment`, searched for by a whole block.
template <typename IdOf>
__device__ __forceinline__ int64_t FirstRowFrom(int64_t segment, int64_t rows, IdOf&& id_of) {
  int64_t begin = 0, end = rows;
  while (begin < end) {
    const int64_t size = end - begin;
    const int64_t step = CeilDivide(size, static_cast<int64_t>(kSmallThreads));
    const int64_t probe = begin + (threadIdx.x + 1) * step - 1;  // the last row of the thread's part
    const int below = __syncthreads_count(probe < end && id_of(probe) < segment);
    begin = min(begin + below * step, end);
    end = min(begin + step - 1, end);
  }
  return begin;
}

// Writes the reduction of nothing to the segments without rows among kFilledSegments of them.
template <typename Reduction, int kVec>
__device__ __forceinline__ void FillEmptySegments(const TileArguments<Reduction>& a, int64_t block) {
  constexpr int kWords = kFilledSegments / 32;
  const int64_t blocks_per_batch = CeilDivide(a.problem.segments, static_cast<int64_t>(kFilledSegments));
  const int64_t b = block / blocks_per_batch;
  const int64_t first = (block - b * blocks_per_batch) * kFilledSegments;
  const int64_t end = min(first + kFilledSegments, a.problem.segments);
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
  const auto id_of = [&](int64_t row) { return a.ids.Id(ids_offset + row); };
  __shared__ uint32_t has_rows[kWords];
  if (threadIdx.x < kWords) has_rows[threadIdx.x] = 0;
  const int64_t begin_row = FirstRowFrom(first, a.problem.rows, id_of);
  const int64_t end_row = FirstRowFrom(end, a.problem.rows, id_of);
  __syncthreads();
#pragma unroll 8
  for (int64_t row = begin_row + threadIdx.x; row < end_row; row += kSmallThreads) {
    const int64_t id = id_of(row), before = row > begin_row ? id_of(row - 1) : -1;
    if (id != before && id >= first && id < end) atomicOr(&has_rows[(id - first) / 32], 1u << ((id - first) % 32));
  }
  __syncthreads();
  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
  const int64_t row_vectors = a.problem.features / kVec;
  for (int64_t i = threadIdx.x; i < (end - first) * row_vectors; i += kSmallThreads) {
    const int64_t segment = i / row_vectors;
    if (has_rows[segment / 32] >> (segment % 32) & 1) continue;
    nothing.Store(a.outputs, a.first_segment + b * a.problem.segments + first + segment, a.problem.features,
                  (i - segment * row_vectors) * kVec);
  }
}

template <typename Reduction, int kVec>
__global__ void __launch_bounds__(kSmallThreads)
    SmallTileKernel(const __grid_constant__ TileArguments<Reduction> a) {
  using T = typename Reduction::Element;
  using Cells = typename Reduction::template Accumulator<kVec>;
  constexpr EdgeInput kInput = kEdgeInput<Reduction>;
  if (blockIdx.x < a.gap_blocks) {
    FillEmptySegments<Reduction, kVec>(a, blockIdx.x);
    return;
  }

  __shared__ uint32_t segments[kSmallBlockRows + 2];  // of the block's rows, the one before and the one after
  __shared__ SourceRow sources[kSmallBlockRows];
  __shared__ Cells slots[kSmallThreads];
  const uint32_t block = blockIdx.x - a.gap_blocks;
  const int64_t row_block = block / a.features.columns;
  const int column_block = block % a.features.columns;
  const int64_t b = row_block / a.blocks_per_batch;
  const int64_t rows = a.problem.rows, features = a.problem.features;
  const int block_rows = a.groups * kSmallTileRows;
  const int group = threadIdx.x / a.features.lanes;
  const int64_t column =
      (static_cast<int64_t>(column_block) * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const bool is_active = group < a.groups && column < features;
  const int64_t head = kInput == EdgeInput::kWeights ? column / a.gathering.features_per_head : 0;
  const int64_t first_segment = a.first_segment + b * a.problem.segments;
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * rows;

  // Rows that are not there are dropped ones.
  const auto load_ids = [&](int64_t first_row) {
    for (int i = threadIdx.x; i < block_rows + 2; i += kSmallThreads) {
      const int64_t row = first_row - 1 + i;
      segments[i] = row >= 0 && row < rows ? a.ids[ids_offset + row] : kDropped;
      if (i < block_rows && row + 1 < rows) {
        sources[i] = a.gathering.template Source<kInput>(b, row + 1, rows, a.problem.data_is_shared);
      }
    }
  };
  ComingRow<T, kVec, kInput> coming[kSmallTileRows];
  const uint32_t* const own_segments = segments + 1 + group * kSmallTileRows;
  const auto ask_for_rows = [&] {
#pragma unroll
    for (int u = 0; u < kSmallTileRows; ++u) {
      if (own_segments[u] == kDropped) continue;
      coming[u].Gather(a.gathering, a.data, sources[group * kSmallTileRows + u], first_segment + own_segments[u],
                       features, column, head);
    }
  };

  const int64_t first_row = (row_block - b * a.blocks_per_batch) * block_rows;
  load_ids(first_row);
  __syncthreads();
  Cells cells;
  cells.Start();
  uint32_t segment = kDropped;  // of the run under reduction
  bool enters = true;           // whether it started in another tile
  if (is_active) {
    ask_for_rows();
    segment = own_segments[-1];
#pragma unroll
    for (int u = 0; u < kSmallTileRows; ++u) {
      if (own_segments[u] != segment) {
        if (enters) {
          slots[threadIdx.x] = cells;
        } else if (segment != kDropped) {
          cells.Store(a.outputs, first_segment + segment, features, column);
        }
        segment = own_segments[u];
        enters = false;
        cells.Start();
      }
      if (segment != kDropped) coming[u].AddTo(cells, a.outputs);
    }
    if (enters) slots[threadIdx.x] = cells;
  }
  __syncthreads();

  // The tile in which a run starts gets what the next ones have of it.
  const uint32_t last_segment = segments[block_rows], before_block = segments[0];
  const bool leaves_block =
      last_segment != kDropped && segments[block_rows + 1] == last_segment && before_block != last_segment;
  bool owns_leaving_run = false;
  if (is_active && !enters && segment != kDropped) {
    int next = group + 1;
    bool goes_on = true;
    for (; next < a.groups && goes_on; ++next) {
      const uint32_t* const of_next = segments + 1 + next * kSmallTileRows;
      if (of_next[0] != segment) break;
      cells.Merge(slots[threadIdx.x + (next - group) * a.features.lanes], a.outputs);
      goes_on = of_next[kSmallTileRows - 1] == segment;
    }
    owns_leaving_run = leaves_block && segment == last_segment && next == a.groups && goes_on;
    if (!owns_leaving_run) cells.Store(a.outputs, first_segment + segment, features, column);
  }
  if (!leaves_block) return;

  // The run that leaves the block, to its end.
  Cells tail;
  tail.Start();
  bool has_tail = false;
  for (int64_t next_row = first_row + block_rows;; next_row += block_rows) {
    __syncthreads();
    load_ids(next_row);
    __syncthreads();
    if (is_active && own_segments[0] == last_segment) {
      has_tail = true;
      ask_for_rows();
#pragma unroll
      for (int u = 0; u < kSmallTileRows; ++u) {
        if (own_segments[u] == last_segment) coming[u].AddTo(tail, a.outputs);
      }
      tail.Normalize();
    }
    if (segments[block_rows] != last_segment || segments[block_rows + 1] != last_segment) break;
  }
  __shared__ bool group_has_tail[kSmallThreads];
  slots[threadIdx.x] = tail;
  if (threadIdx.x % a.features.lanes == 0) group_has_tail[group] = has_tail;
  __syncthreads();
  if (owns_leaving_run) {
    for (int other = 0; other < a.groups && group_has_tail[other]; ++other) {
      cells.Merge(slots[threadIdx.x + (other - group) * a.features.lanes], a.outputs);
    }
    cells.Store(a.outputs, first_segment + segment, features, column);
  }
}

}  // namespace jax_baracuda::segment
