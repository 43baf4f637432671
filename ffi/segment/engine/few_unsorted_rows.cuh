// Reduction of few unsorted rows in one launch. It also serves few sorted pairs of rows.
//
// Each block sorts the rows of its own segments in shared memory (see sort_few_rows.cuh). Groups of threads then take
// equal shares of the sorted rows, so a hot segment keeps all groups of its block busy. The parts of a segment in later
// shares are merged as a tree. The order of merges depends on shapes and ids only.
#pragma once

#include "ffi/segment/engine/sort_few_rows.cuh"
#include "ffi/segment/engine/tiles.cuh"

namespace jax_baracuda::segment {

// Few lanes per row, so that many groups share the rows of a hot segment.
inline constexpr int kMaxFewUnsortedRowLanes = 8;
inline constexpr int kFewUnsortedRowsInFlight = 4;

struct FewUnsortedRowGrid {
  FeatureLanes features;
  int groups, own_segments;
  int64_t blocks_per_batch;

  FewUnsortedRowGrid(const Problem& problem, int vector)
      : features(AssignFeatures(problem.features / vector, kMaxFewUnsortedRowLanes)),
        groups(kFewRowThreads / features.lanes),
        own_segments(OwnSegments(problem.segments, problem.batch * features.columns)),
        blocks_per_batch(CeilDivide(problem.segments, int64_t{own_segments})) {}
};

// Where the sort's arrays begin in shared memory. The partial results of the threads come first. They replace the lists
// of the sort, and may be longer.
template <typename Cells>
JB_HOST_DEVICE int SorterOffset(const FewRowSorter& sorter) {
  const int longer = static_cast<int>(kFewRowThreads * sizeof(Cells)) - sorter.FreeBytes();
  return longer > 0 ? longer : 0;
}

template <typename Reduction, int kVec>
int FewUnsortedRowBytes(const Problem& problem, const FewUnsortedRowGrid& grid) {
  const FewRowSorter sorter(static_cast<int>(problem.rows), grid.own_segments);
  return SorterOffset<typename Reduction::template Accumulator<kVec>>(sorter) + sorter.Bytes();
}

template <typename Reduction, typename Input, int kVec>
__global__ void __launch_bounds__(kFewRowThreads)
    FewUnsortedRowKernel(const __grid_constant__ InputArguments<Reduction, Input> a,
                         const __grid_constant__ FewUnsortedRowGrid grid) {
  using T = typename Reduction::Element;
  using Cells = typename Reduction::template Accumulator<kVec>;
  constexpr int kInFlight = kFewUnsortedRowsInFlight;
  extern __shared__ uint4 shared_memory[];
  const uint32_t columns = grid.features.columns, lanes = grid.features.lanes;
  const uint32_t block = blockIdx.x / columns, column_block = blockIdx.x - block * columns;
  const uint32_t b = block / static_cast<uint32_t>(grid.blocks_per_batch);
  const uint32_t block_of_batch = block - b * static_cast<uint32_t>(grid.blocks_per_batch);
  const int64_t rows = a.problem.rows, features = a.problem.features;
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * rows;
  const uint32_t first_own = block_of_batch * grid.own_segments;
  const int own_segments = static_cast<int>(min(a.problem.segments - first_own, int64_t{grid.own_segments}));

  FewRowSorter sorter(static_cast<int>(rows), grid.own_segments);
  Cells* const partials = reinterpret_cast<Cells*>(shared_memory);
  sorter.template Sort<false>(reinterpret_cast<char*>(shared_memory) + SorterOffset<Cells>(sorter), first_own,
                              [&](int row) { return a.ids[ids_offset + row]; });

  const int group = threadIdx.x / lanes;
  const int64_t column = (static_cast<int64_t>(column_block) * lanes + (threadIdx.x - group * lanes)) * kVec;
  const bool is_active = group < grid.groups && column < features;
  const int64_t first_segment = a.first_segment + b * a.problem.segments + first_own;
  const T* const data = a.data + (a.problem.data_is_shared ? 0 : b * rows * features) + column;

  // Shares of fewer rows would not load faster, and leave more partial results to merge.
  const int total = sorter.count();
  const int share = max(static_cast<int>(CeilDivide(total, grid.groups)), kInFlight);
  const int begin = min(group * share, total), end = min(begin + share, total);
  Cells cells;
  cells.Start();
  int segment = 0, segment_end = 0;
  bool enters = false;  // the current segment started in the share of an earlier group
  // If a segment enters the share: the number of shares that it enters, and the number of this one among them.
  int parts = 0, part = 0;
  if (is_active && begin < end) {
    segment = sorter.SegmentOf(begin);
    segment_end = sorter.Start(segment + 1);
    const int segment_start = sorter.Start(segment);
    enters = segment_start < begin;
    if (enters) {
      const int first_entered = segment_start / share + 1;
      part = group - first_entered;
      parts = static_cast<int>(CeilDivide(segment_end, share)) - first_entered;
    }
    for (int first = begin; first < end; first += kInFlight) {
      typename Input::template Row<kVec> in_flight[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int row = sorter.Row(min(first + u, end - 1));
        in_flight[u].number = row;
        in_flight[u].values = LoadPacked<kVec>(data + row * features);
        if constexpr (kHasPairs<Input>) {
          const int64_t second_row = a.input.second_is_shared ? row : b * rows + row;
          in_flight[u].second_values = LoadPacked<kVec>(a.input.second + second_row * features + column);
        }
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (first + u >= end) break;
        if (first + u == segment_end) {
          if (enters) {
            partials[threadIdx.x] = cells;
          } else {
            cells.Store(a.outputs, first_segment + segment, features, column);
          }
          enters = false;
          cells.Start();
          do segment_end = sorter.Start(++segment + 1);
          while (segment_end == first + u);
        }
        in_flight[u].AddTo(cells, a.outputs);
      }
    }
    if (enters) partials[threadIdx.x] = cells;
  }
#pragma unroll 1
  for (int step = 1; __syncthreads_or(step < parts); step *= 2) {
    if (part % (2 * step) == 0 && part + step < parts) {
      Cells merged = partials[threadIdx.x];
      merged.Merge(partials[threadIdx.x + step * lanes], a.outputs);
      partials[threadIdx.x] = merged;
    }
  }
  if (!is_active) return;
  if (begin < end && !enters) {
    if (segment_end > end) cells.Merge(partials[threadIdx.x + lanes], a.outputs);
    cells.Store(a.outputs, first_segment + segment, features, column);
  }
  Cells nothing;
  nothing.Start();
  for (int empty = group; empty < own_segments; empty += grid.groups) {
    if (sorter.Start(empty) == sorter.Start(empty + 1)) {
      nothing.Store(a.outputs, first_segment + empty, features, column);
    }
  }
}

}  // namespace jax_baracuda::segment
