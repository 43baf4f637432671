// Reduction of sorted gathered rows in one launch, which waits for memory only a few times. For more rows than
// few_sorted_rows.cuh serves well.
//
// Rows are cut into tiles of kSmallTileRows, one per group of threads. A run belongs to the block in which it starts.
// The block's groups combine their parts of it. If the run leaves the block, they read on to its end, one block of rows
// per step. So no second kernel has to merge anything, but a hot segment keeps one block busy (see UsesSmallTiles).
// The order of merges depends on shapes and ids only.
//
// Empty segments are filled as by tiles. Unsorted ids give wrong results, but no access out of bounds and no endless
// loop.
#pragma once

#include "ffi/segment/engine/gathering.cuh"
#include "ffi/segment/engine/tiles.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

inline constexpr int kSmallTileThreads = 256;
inline constexpr int kSmallTileRows = 8, kSmallRowsInFlight = 4;
inline constexpr int kSmallBlockRows = kSmallTileThreads * kSmallTileRows;  // maximum

// The rows that a block reads in one step.
inline int64_t RowsOfSmallStep(const FeatureLanes& features) {
  return int64_t{kSmallTileThreads / features.lanes} * kSmallTileRows;
}

// At most `max_rows`, and so few per segment on average that a very hot segment is unlikely.
inline bool UsesSmallTiles(const Problem& problem, int64_t max_rows) {
  return problem.rows <= max_rows && problem.rows / Tuning::kMaxRowsToSegmentOfSmallTiles <= problem.segments &&
         problem.batch * problem.rows * problem.features <= Tuning::kMaxElementsOfSmallTiles &&
         problem.NumCells() <= Tuning::kMaxElementsOfSmallTiles;
}

template <typename Reduction, typename Input, int kVec>
__global__ void __launch_bounds__(kSmallTileThreads)
    SmallTileKernel(const __grid_constant__ InputArguments<Reduction, Input> a) {
  using Cells = typename Reduction::template Accumulator<kVec>;
  if (blockIdx.x < a.gap_blocks) {
    FillWideGaps<Reduction, kVec>(a);
    return;
  }

  __shared__ uint32_t segments[kSmallBlockRows + 2];  // of the block's rows, the previous row and the next one
  __shared__ SourceRow sources[kSmallBlockRows];
  __shared__ Cells partials[kSmallTileThreads];
  const uint32_t block = blockIdx.x - a.gap_blocks, columns = a.features.columns;
  const uint32_t row_block = block / columns, column_block = block % columns;
  const uint32_t blocks_per_batch = static_cast<uint32_t>(a.blocks_per_batch);
  const uint32_t b = row_block / blocks_per_batch;
  const int64_t rows = a.problem.rows, features = a.problem.features;
  const int block_rows = a.groups * kSmallTileRows;
  const int group = threadIdx.x / a.features.lanes;
  const int64_t own_column =
      (static_cast<int64_t>(column_block) * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const bool is_active = group < a.groups && own_column < features;
  const int64_t column = is_active ? own_column : 0;  // Prepare may read at this column
  const int64_t at = a.input.At(b, rows, column);
  const int64_t first_segment = a.first_segment + b * a.problem.segments;
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * rows;

  // Rows out of range count as dropped.
  const auto load_ids = [&](int64_t first_row) {
    for (int i = threadIdx.x; i < block_rows + 2; i += kSmallTileThreads) {
      const int64_t row = first_row - 1 + i, next_row = row + 1;
      const uint32_t segment = row >= 0 && row < rows ? a.ids[ids_offset + row] : kDropped;
      SourceRow source{};
      if (i < block_rows && next_row < rows) {
        source = a.input.template Source<Input::kNeedsEdges>(b, next_row, rows, a.problem.data_is_shared);
      }
      segments[i] = segment;
      if (i < block_rows) sources[i] = source;
    }
  };
  const uint32_t* const own_segments = segments + 1 + group * kSmallTileRows;
  // Calls add(row, segment) for the rows of the tile, in order. Without `participates`, all rows count as dropped: the
  // thread is here because all lanes of its warp have to be.
  const auto for_each_row = [&](bool participates, auto&& add) {
    if (!participates && !Input::kSharesLanes) return;
#pragma unroll 1
    for (int i = 0; i < kSmallTileRows; i += kSmallRowsInFlight) {
      typename Input::template Row<kVec> in_flight[kSmallRowsInFlight];
#pragma unroll
      for (int u = 0; u < kSmallRowsInFlight; ++u) {
        const uint32_t segment = participates ? own_segments[i + u] : kDropped;
        if (segment == kDropped) continue;
        in_flight[u].Load(a.input, a.data, sources[group * kSmallTileRows + i + u],
                          {first_segment + segment, features, column, at});
      }
#pragma unroll
      for (int u = 0; u < kSmallRowsInFlight; ++u) in_flight[u].Prepare(a.outputs, column);
#pragma unroll
      for (int u = 0; u < kSmallRowsInFlight; ++u) {
        if (participates) add(in_flight[u], own_segments[i + u]);
      }
    }
  };

  const int64_t first_row = static_cast<int64_t>(row_block - b * blocks_per_batch) * block_rows;
  load_ids(first_row);
  __syncthreads();
  Cells cells;
  cells.Start();
  uint32_t segment = kDropped;  // segment of the current run
  bool enters = true;           // whether the current run started in an earlier tile
  if (is_active) segment = own_segments[-1];
  for_each_row(is_active, [&](const auto& row, uint32_t own_segment) {
    if (own_segment != segment) {
      if (enters) {
        partials[threadIdx.x] = cells;
      } else if (segment != kDropped) {
        cells.Store(a.outputs, first_segment + segment, features, column);
      }
      segment = own_segment;
      enters = false;
      cells.Start();
    }
    if (segment != kDropped) row.AddTo(cells, a.outputs);
  });
  if (is_active) {
    if (enters) partials[threadIdx.x] = cells;
#pragma unroll 1
    for (int i = 0; i < kSmallTileRows; ++i) {
      const uint32_t before = own_segments[i - 1], own = own_segments[i];
      if (!IsNarrowGap(before, own)) continue;
      FillGap<Reduction, kVec>(a.outputs, first_segment + before + 1, first_segment + own, features, column);
    }
  }
  __syncthreads();

  // The tile in which a run starts merges the parts of the following tiles.
  const uint32_t last_segment = segments[block_rows], before_block = segments[0];
  const bool leaves_block =
      last_segment != kDropped && segments[block_rows + 1] == last_segment && before_block != last_segment;
  bool owns_leaving_run = false;
  if (is_active && !enters && segment != kDropped) {
    int next = group + 1;
    bool continues = true;
    for (; next < a.groups && continues; ++next) {
      const uint32_t* const of_next = segments + 1 + next * kSmallTileRows;
      if (of_next[0] != segment) break;
      cells.Merge(partials[threadIdx.x + (next - group) * a.features.lanes], a.outputs);
      continues = of_next[kSmallTileRows - 1] == segment;
    }
    owns_leaving_run = leaves_block && segment == last_segment && next == a.groups && continues;
    if (!owns_leaving_run) cells.Store(a.outputs, first_segment + segment, features, column);
  }
  if (!leaves_block) return;

  // Follows the run that leaves the block to its end.
  Cells tail;
  tail.Start();
  bool has_tail = false;
  for (int64_t next_row = first_row + block_rows;; next_row += block_rows) {
    __syncthreads();
    load_ids(next_row);
    __syncthreads();
    const bool is_in_run = is_active && own_segments[0] == last_segment;
    has_tail |= is_in_run;
    for_each_row(is_in_run, [&](const auto& row, uint32_t own_segment) {
      if (own_segment == last_segment) row.AddTo(tail, a.outputs);
    });
    if (segments[block_rows] != last_segment || segments[block_rows + 1] != last_segment) break;
  }
  __shared__ bool group_has_tail[kSmallTileThreads];
  partials[threadIdx.x] = tail;
  if (threadIdx.x % a.features.lanes == 0) group_has_tail[group] = has_tail;
  __syncthreads();
  if (owns_leaving_run) {
    for (int other = 0; other < a.groups && group_has_tail[other]; ++other) {
      cells.Merge(partials[threadIdx.x + (other - group) * a.features.lanes], a.outputs);
    }
    cells.Store(a.outputs, first_segment + segment, features, column);
  }
}

}  // namespace jax_baracuda::segment
