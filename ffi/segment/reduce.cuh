// Reduces any reduction (see reduction.cuh) by the kernels that use no atomics, and chooses among them.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/scratch.h"
#include "ffi/segment/order.cuh"
#include "ffi/segment/private_table.cuh"
#include "ffi/segment/runs.cuh"
#include "ffi/segment/tiles.cuh"

namespace jax_baracuda::segment {

enum class Way {
  kFill,          // there are no rows
  kPrivateTable,  // few segments: a table of them for each thread
  kRuns,          // narrow rows in order: whole rows to a thread
  kTiles,         // rows in order, by tiles
  kStagedTiles,   // the same for rows too narrow for whole-vector loads, which pass through shared memory
  kOrderTiles,    // rows brought into order first, then tiles
};

inline constexpr int64_t kSectorBytes = 32;

// Rows in order by runs or tiles, rows in any order brought into order.
inline Way ChooseOrderedWay(const Problem& problem, int64_t element_bytes, bool indices_are_sorted) {
  if (problem.rows == 0) return Way::kFill;
  if (!indices_are_sorted) return Way::kOrderTiles;
  if (TakesRuns(problem, element_bytes)) return Way::kRuns;
  return problem.features * element_bytes < kSectorBytes ? Way::kStagedTiles : Way::kTiles;
}

// The rule, from shapes and flags alone. Few segments with many narrow rows each: a table of the segments for each thread,
// which does not mind the order of the rows. Else as above. `state_bytes` is what a reduction keeps for a cell, at most.
inline Way ChooseWay(const Problem& problem, int64_t element_bytes, int64_t state_bytes, bool indices_are_sorted) {
  const bool has_few_segments =
      problem.segments <= 1024 && problem.rows / 1024 >= problem.segments && problem.batch <= kMostPrivateBlocks &&
      kLeastPrivateWarps * PrivateWarpBytes(problem.segments, state_bytes) <= kPrivateTableBytes;
  if (problem.rows > 0 && has_few_segments && problem.features <= kMostPrivateFeatures) return Way::kPrivateTable;
  return ChooseOrderedWay(problem, element_bytes, indices_are_sorted);
}

// How rows are dealt to blocks.
struct RowGrid {
  Problem problem;  // the batch joined into one element where rows are brought into order
  FeatureLanes features;
  int groups;
  int64_t blocks_per_batch;
  int64_t row_blocks;
};

inline RowGrid MakeRowGrid(const Problem& problem, Way way, int64_t element_bytes) {
  RowGrid grid;
  grid.problem = problem;
  if (way == Way::kOrderTiles) {
    grid.problem.batch = 1;
    grid.problem.rows = problem.batch * problem.rows;
    grid.problem.segments = problem.batch * problem.segments;
  }
  if (way == Way::kRuns) {
    grid.features = {1, 1};
    grid.groups = 0;
    grid.blocks_per_batch = CeilDivide(problem.rows, RunBlockRows(problem.features));
  } else {
    const int vector = way == Way::kStagedTiles ? 1 : RowVector(problem.features, element_bytes);
    grid.features = DealFeatures(problem.features / vector, 32);
    grid.groups = kTileThreads / grid.features.lanes;
    grid.blocks_per_batch = CeilDivide(grid.problem.rows, static_cast<int64_t>(grid.groups) * kTileRows);
  }
  grid.row_blocks = grid.problem.batch * grid.blocks_per_batch;
  return grid;
}

inline int64_t ReduceScratchBytes(const Problem& problem, Way way, int64_t element_bytes, int64_t state_bytes) {
  ScratchSizes sizes;
  switch (way) {
    case Way::kFill:
      break;
    case Way::kPrivateTable:
      sizes.Add(int64_t{kMostPrivateBlocks} * problem.segments * problem.features * state_bytes);
      break;
    case Way::kOrderTiles:
      sizes.Add(SegmentOrderScratchBytes(problem));
      [[fallthrough]];
    default: {
      const RowGrid grid = MakeRowGrid(problem, way, element_bytes);
      sizes.Add(problem.batch * problem.segments);
      sizes.Add(grid.row_blocks * sizeof(uint32_t));
      sizes.Add(grid.row_blocks * problem.features * state_bytes);
      sizes.Add(grid.row_blocks * problem.features * state_bytes);
    }
  }
  return sizes.total;
}

template <typename Reduction>
struct Reducer {
  using T = typename Reduction::Element;

  Problem problem;
  Way way;
  const T* data;
  const void* segment_ids;
  bool ids_are_64_bit;
  typename Reduction::Outputs outputs;
  int64_t state_bytes;
  void* scratch;
  cudaStream_t stream;
  int32_t* order = nullptr;  // [rows], where the order is wanted that rows are brought into

  cudaError_t Launch() const {
    switch (way) {
      case Way::kFill:
        return FillAll();
      case Way::kPrivateTable:
        return PrivateTable();
      default:
        return InOrder();
    }
  }

 private:
  SegmentIds Ids() const { return {segment_ids, ids_are_64_bit, problem.segments}; }

  cudaError_t FillAll() const {
    return DispatchRowVector<T>(problem.features, [&](auto vector) {
      constexpr int kVec = decltype(vector)::value;
      TileArguments<Reduction> a{};
      a.problem = problem;
      a.outputs = outputs;
      a.features = DealFeatures(problem.features / kVec, 32);
      return LaunchFinish<kVec>(a, 0);
    });
  }

  cudaError_t PrivateTable() const {
    using Cells = typename Reduction::template Accumulator<1>;
    PrivateTableArguments<Reduction> a{};
    a.data = data;
    a.ids = Ids();
    a.problem = problem;
    a.outputs = outputs;
    a.partials = scratch;
    int device = 0, multiprocessors = 0, most_shared_bytes = 0;
    if (cudaError_t e = cudaGetDevice(&device)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
    if (cudaError_t e =
            cudaDeviceGetAttribute(&most_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
      return e;
    }
    const int64_t warp_bytes = PrivateWarpBytes(problem.segments, sizeof(Cells));
    const int64_t fitting_warps = most_shared_bytes / warp_bytes;
    const int warps = static_cast<int>(fitting_warps < kMostPrivateWarps ? fitting_warps : kMostPrivateWarps);
    const int64_t wanted = CeilDivide(multiprocessors, problem.batch), most = kMostPrivateBlocks / problem.batch;
    a.blocks_per_batch = static_cast<int>(wanted < most ? wanted : most);
    const int shared_bytes = static_cast<int>(warps * warp_bytes);
    const auto kernel = PrivateTableKernel<Reduction>;
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)) {
      return e;
    }
    kernel<<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch), 32 * warps, shared_bytes, stream>>>(a);
    if (cudaError_t e = cudaGetLastError()) return e;
    const int64_t cells = problem.batch * problem.segments * problem.features;
    MergePartialsKernel<Reduction>
        <<<static_cast<uint32_t>(CeilDivide(cells, kPartialCells)), kPartialCells * kPartialSlices, 0, stream>>>(a);
    return cudaGetLastError();
  }

  cudaError_t InOrder() const {
    ScratchCarver carver(scratch);
    TileArguments<Reduction> a{};
    if (way == Way::kOrderTiles) {
      char* order_scratch = carver.Take<char>(SegmentOrderScratchBytes(problem));
      SegmentOrder segment_order;
      if (cudaError_t e =
              LaunchSegmentOrder(problem, segment_ids, ids_are_64_bit, order_scratch, &segment_order, stream)) {
        return e;
      }
      a.sorted_segments = segment_order.segments;
      a.order = segment_order.rows;
      if (order != nullptr) {
        if (cudaError_t e = cudaMemcpyAsync(order, segment_order.rows, problem.rows * sizeof(int32_t),
                                            cudaMemcpyDeviceToDevice, stream)) {
          return e;
        }
      }
    }
    const RowGrid grid = MakeRowGrid(problem, way, sizeof(T));
    a.data = data;
    a.ids = Ids();
    a.problem = grid.problem;
    a.batch_rows = problem.rows;
    a.outputs = outputs;
    const int64_t segments = problem.batch * problem.segments;
    a.present = carver.Take<uint8_t>(segments);
    a.pieces.head_segment = carver.Take<uint32_t>(grid.row_blocks);
    a.pieces.head = carver.Take<char>(grid.row_blocks * problem.features * state_bytes);
    a.pieces.tail = carver.Take<char>(grid.row_blocks * problem.features * state_bytes);
    a.features = grid.features;
    a.groups = grid.groups;
    a.blocks_per_batch = grid.blocks_per_batch;
    if (cudaError_t e = cudaMemsetAsync(a.present, 0, segments, stream)) return e;
    if (way == Way::kRuns) return Runs(a, grid);
    if (way == Way::kStagedTiles) return Tiles<1, RowSource::kStaged>(a, grid);
    return DispatchRowVector<T>(problem.features, [&](auto vector) {
      constexpr int kVec = decltype(vector)::value;
      return way == Way::kOrderTiles ? Tiles<kVec, RowSource::kOrdered>(a, grid)
                                     : Tiles<kVec, RowSource::kDirect>(a, grid);
    });
  }

  cudaError_t Runs(const TileArguments<Reduction>& a, const RowGrid& grid) const {
    switch (problem.features) {
      case 1:
        return Runs<1>(a, grid);
      case 2:
        return Runs<2>(a, grid);
      case 4:
        return Runs<4>(a, grid);
      default:
        return Runs<8>(a, grid);
    }
  }

  template <int kFeatures>
  cudaError_t Runs(const TileArguments<Reduction>& a, const RowGrid& grid) const {
    if constexpr (kFeatures * sizeof(T) > 32) {
      return cudaErrorInvalidValue;
    } else {
      RunKernel<Reduction, kFeatures><<<static_cast<uint32_t>(grid.row_blocks), kRunThreads, 0, stream>>>(a);
      if (cudaError_t e = cudaGetLastError()) return e;
      return LaunchMerge<kFeatures>(a, grid);
    }
  }

  template <int kVec, RowSource kSource>
  cudaError_t Tiles(const TileArguments<Reduction>& a, const RowGrid& grid) const {
    const int shared_bytes = TileShared<Reduction, kVec, kSource>::Bytes(grid.groups, problem.features);
    const int64_t blocks = grid.row_blocks * grid.features.columns;
    TileKernel<Reduction, kVec, kSource><<<static_cast<uint32_t>(blocks), kTileThreads, shared_bytes, stream>>>(a);
    if (cudaError_t e = cudaGetLastError()) return e;
    return LaunchMerge<kVec>(a, grid);
  }

  template <int kVec>
  cudaError_t LaunchMerge(const TileArguments<Reduction>& a, const RowGrid& grid) const {
    const int64_t windows = CeilDivide(grid.row_blocks, kMergeWindow);
    MergeWindowsKernel<Reduction, kVec>
        <<<static_cast<uint32_t>(windows * grid.features.columns), kMergeThreads, 0, stream>>>(a, grid.row_blocks);
    if (cudaError_t e = cudaGetLastError()) return e;
    return LaunchFinish<kVec>(a, grid.row_blocks);
  }

  template <int kVec>
  cudaError_t LaunchFinish(const TileArguments<Reduction>& a, int64_t slots) const {
    const int64_t windows = CeilDivide(slots, kMergeWindow);
    // A single window leaves nothing to merge.
    const int64_t merge_blocks = windows > 1 ? CeilDivide(windows, kMergeWindow) * a.features.columns : 0;
    const int64_t segments = problem.batch * problem.segments;
    const int64_t fill_blocks = CeilDivide(segments, kFillSegments) * a.features.columns;
    FinishKernel<Reduction, kVec><<<static_cast<uint32_t>(merge_blocks + fill_blocks), kMergeThreads, 0, stream>>>(
        a, slots, merge_blocks);
    return cudaGetLastError();
  }
};

}  // namespace jax_baracuda::segment
