// Reduction of few sorted rows, own or gathered ones, in one launch, which usually waits for memory once or twice.
//
// Each group of threads reads one row and the ids before and after it. A scan over the groups of a block combines runs.
// The last groups of a block look ahead: they read the first rows of the next block, so that most runs that leave the
// block end within sight. If a run does not, the block in which it starts reads on to its end, many rows at once. So no
// second kernel has to merge anything, but a hot segment keeps one block busy (see UsesFewSortedRows). The order of
// merges depends on shapes and ids only. The code is kept short: a kernel that runs once also waits for its
// instructions.
//
// Empty segments are the gaps between runs, before the first row and after the last one; if most segments are empty, a
// launch before this one has filled them all. Unsorted ids give wrong results, but no access out of bounds and no
// endless loop.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ffi/segment/engine/gathering.cuh"
#include "ffi/segment/engine/tiles.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

inline constexpr int kFewSortedRowThreads = 256;
inline constexpr int kRowsOfTail = 4;  // rows per group and step when a run is followed beyond the block

// The groups of a block, and those of them that own a row: the others look ahead.
inline int FewSortedRowGroups(const FeatureLanes& features) { return kFewSortedRowThreads / features.lanes; }
JB_HOST_DEVICE int OwnGroups(int groups) { return groups - groups / 4; }

// Blocks of a batch element. They include one position after the last row, for the last gap.
inline int64_t FewSortedRowBlocks(int64_t rows, int groups) {
  return CeilDivide(rows + 1, static_cast<int64_t>(OwnGroups(groups)));
}

// Rows so few that one block could read all of them, and those of a segment, on average, in a few steps.
inline bool UsesFewSortedRows(const Problem& problem, const FeatureLanes& features) {
  const int64_t rows_of_step = int64_t{FewSortedRowGroups(features)} * kRowsOfTail;
  return problem.batch * problem.rows <= Tuning::kMaxFewSortedRows &&
         problem.rows <= Tuning::kMaxStepsOfFewSortedRows * rows_of_step &&
         problem.rows / (Tuning::kMaxStepsToFewSortedSegment * rows_of_step) <= problem.segments &&
         problem.batch * problem.rows * problem.features <= Tuning::kMaxElementsOfFewSortedRows &&
         problem.NumCells() <= Tuning::kMaxElementsOfFewSortedRows;
}

template <typename Reduction, typename Input, int kVec>
__global__ void __launch_bounds__(kFewSortedRowThreads)
    FewSortedRowKernel(const __grid_constant__ InputArguments<Reduction, Input> a, bool fills_gaps) {
  using Cells = typename Reduction::template Accumulator<kVec>;
  using Row = typename Input::template Row<kVec>;
  constexpr bool kGathers = std::is_base_of_v<Edges, Input>;
  __shared__ Cells partials[2][kFewSortedRowThreads];
  __shared__ int partial_starts[2][kFewSortedRowThreads];
  __shared__ int leaving_segment;

  constexpr int kNoStart = -1;
  const int groups = a.groups, own_groups = OwnGroups(groups);
  const uint32_t columns = a.features.columns, lanes = a.features.lanes;
  const uint32_t row_block = blockIdx.x / columns, column_block = blockIdx.x - row_block * columns;
  const uint32_t blocks_per_batch = static_cast<uint32_t>(a.blocks_per_batch);
  const uint32_t b = row_block / blocks_per_batch;
  const int features = static_cast<int>(a.problem.features);
  const int rows = static_cast<int>(a.problem.rows), segments = static_cast<int>(a.problem.segments);
  const int group = threadIdx.x / lanes, lane = threadIdx.x - group * lanes;
  const int first_row = static_cast<int>(row_block - b * blocks_per_batch) * own_groups;
  const int own_column = static_cast<int>(column_block * lanes + lane) * kVec;
  const bool has_row = group < groups, has_column = has_row && own_column < features;
  const int column = has_column ? own_column : 0;  // threads without a column read the first one
  const int64_t first_segment = a.first_segment + b * a.problem.segments;
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
  const auto* const data = a.data + (kGathers || a.problem.data_is_shared ? 0 : int64_t{b} * rows * features) + column;

  // The segment of a row: -1 before the first row, `segments` after the last one.
  const auto segment_of = [&](int row) {
    const int64_t id = a.ids.Id(ids_offset + min(max(row, 0), rows - 1));
    const int segment = static_cast<int>(min(max(id, int64_t{-1}), static_cast<int64_t>(segments)));
    return row < 0 ? -1 : row < rows ? segment : segments;
  };
  const auto is_member = [&](int segment) { return segment >= 0 && segment < segments; };
  int64_t at = 0;
  if constexpr (kGathers) at = a.input.At(b, rows, column);
  const auto load = [&](int row, int segment) {
    Row loaded;
    const int nearest = min(row, rows - 1);
    if constexpr (kGathers) {
      const SourceRow source = a.input.template Source<Input::kNeedsEdges>(b, nearest, rows, a.problem.data_is_shared);
      loaded.Load(a.input, a.data, source, {is_member(segment) ? first_segment + segment : -1, features, column, at});
    } else {
      loaded.values = LoadPacked<kVec>(data + nearest * features);
      loaded.number = row;
    }
    return loaded;
  };
  const auto store = [&](const Cells& cells, int segment) {
    if (has_column) cells.Store(a.outputs, first_segment + segment, features, column);
  };
  Cells nothing;
  nothing.Start();

  const int row = first_row + group;
  const int before = has_row ? segment_of(row - 1) : segments, own = has_row ? segment_of(row) : segments;
  const int after = has_row ? segment_of(row + 1) : segments;
  Row own_row = load(row, own);

  // Fills all segments before that of the block's last row. After a barrier, results overwrite those with rows.
  if (fills_gaps && has_row) {
    const int first = segment_of(first_row - 1) + 1, last = segment_of(first_row + own_groups - 1);
#pragma unroll 1
    for (int segment = first + group; segment < last; segment += groups) store(nothing, segment);
  }

  // The partial result of the row's run within the block, up to the row, and the group in which the run starts.
  Cells cells = nothing;
  own_row.Prepare(a.outputs, column);
  if (has_column && is_member(own)) own_row.AddTo(cells, a.outputs);
  int start = own != before ? group : kNoStart;
  int buffer = 0;
#pragma unroll 1
  for (int step = 1;; step *= 2, buffer ^= 1) {
    partials[buffer][threadIdx.x] = cells;
    partial_starts[buffer][threadIdx.x] = start;
    const bool goes_back = has_row && start == kNoStart && group >= step;
    if (!__syncthreads_or(goes_back)) break;
    if (goes_back) {
      const int other = threadIdx.x - step * lanes;
      Cells earlier = partials[buffer][other];
      earlier.Merge(cells, a.outputs);
      cells = earlier;
      start = partial_starts[buffer][other];
    }
  }

  const bool ends_here = own != after, is_last = group == groups - 1;
  const bool is_own = has_row && start != kNoStart && start < own_groups && is_member(own);
  if (is_last && lane == 0) leaving_segment = is_own && !ends_here ? own : -1;
  __syncthreads();
  if (leaving_segment >= 0) {
    // Follows the run that leaves the block to its end.
    Cells tail = nothing;
    bool continues = true;
#pragma unroll 1
    for (int first = first_row + groups; continues; first += kRowsOfTail * groups) {
      Row of_tail[kRowsOfTail];
      bool belongs[kRowsOfTail], all_belong = true;
#pragma unroll
      for (int u = 0; u < kRowsOfTail; ++u) {
        const int tail_row = first + u * groups + group, segment = segment_of(tail_row);
        belongs[u] = segment == leaving_segment;
        all_belong = all_belong && belongs[u];
        of_tail[u] = load(tail_row, segment);
      }
      // Between the loads and their uses: otherwise the compiler loads each row where it is added.
      continues = __syncthreads_and(all_belong || !has_row);
#pragma unroll
      for (int u = 0; u < kRowsOfTail; ++u) of_tail[u].Prepare(a.outputs, column);
#pragma unroll
      for (int u = 0; u < kRowsOfTail; ++u) {
        if (has_column && belongs[u]) of_tail[u].AddTo(tail, a.outputs);
      }
    }
    partials[0][threadIdx.x] = tail;
#pragma unroll 1
    for (int left = groups, half; left > 1; left = half) {
      half = (left + 1) / 2;
      __syncthreads();
      if (group + half < left) {
        tail.Merge(partials[0][threadIdx.x + half * lanes], a.outputs);
        partials[0][threadIdx.x] = tail;
      }
    }
    __syncthreads();
    if (is_last) cells.Merge(partials[0][lane], a.outputs);
  }
  if (is_own && (ends_here || is_last)) store(cells, own);
}

}  // namespace jax_baracuda::segment
