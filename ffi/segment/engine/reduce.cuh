// Launches any reduction (see reduction.cuh) with the kernels that use no atomics, and chooses among them.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <type_traits>

#include "ffi/core/device_attributes.h"
#include "ffi/core/plan.h"
#include "ffi/core/scratch.h"
#include "ffi/segment/engine/batch_of_few_rows.cuh"
#include "ffi/segment/engine/few_sorted_rows.cuh"
#include "ffi/segment/engine/few_unsorted_rows.cuh"
#include "ffi/segment/engine/fill.cuh"
#include "ffi/segment/engine/order.cuh"
#include "ffi/segment/engine/private_table.cuh"
#include "ffi/segment/engine/runs.cuh"
#include "ffi/segment/engine/small_tiles.cuh"
#include "ffi/segment/engine/strategies.h"
#include "ffi/segment/engine/tiles.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

// Unsorted rows are sorted first, few of them within the reduction. There each block reads all ids and sorts the rows of
// its own segments, once more for each block of columns.
inline Strategy ChooseUnsortedStrategy(const Problem& problem) {
  const bool is_few =
      UsesFewUnsortedRows(problem) && problem.rows * problem.features <= Tuning::kMaxElementsOfFewUnsortedRows;
  return is_few ? Strategy::kFewUnsortedRows : Strategy::kSortThenTiles;
}

// Batches of few rows in any order; other unsorted rows as above; sorted rows in one launch if they are few, else by runs
// or tiles.
inline Strategy ChooseOrderedStrategy(const Problem& problem, int64_t element_bytes, bool indices_are_sorted) {
  if (problem.rows == 0) return Strategy::kFill;
  if (UsesBatchOfFewRows(problem, element_bytes)) return Strategy::kBatchOfFewRows;
  if (!indices_are_sorted) return ChooseUnsortedStrategy(problem);
  const FeatureLanes features = AssignFeatures(problem.features / RowVector(problem.features, element_bytes), 32);
  if (UsesFewSortedRows(problem, features)) return Strategy::kFewSortedRows;
  return UsesRuns(problem, element_bytes) ? Strategy::kRuns : Strategy::kTiles;
}

// Depends on shapes and flags only. Few segments with many narrow rows each use private tables, which accept rows in
// any order; everything else is as above. Sorted single numbers and pairs took 0.7 to 0.9 of the time of private tables
// as runs or few sorted rows (H200, 2,000 to 6M rows in two segments). `state_bytes` is the maximum size of an
// accumulator per cell.
inline Strategy ChooseStrategy(const Problem& problem, int64_t element_bytes, int64_t state_bytes,
                               bool indices_are_sorted) {
  if (problem.HasNoResult()) return Strategy::kNothing;
  const bool fits_tables = problem.rows / Tuning::kMinRowsToPrivateSegment >= problem.segments &&
                           problem.batch <= kMaxPrivateBlocks && problem.features <= kMaxPrivateFeatures &&
                           kMinPrivateWarps * PrivateWarpBytes(problem.segments, state_bytes) <= kPrivateTableBytes;
  const bool suits_runs = indices_are_sorted && problem.features <= 2 && UsesRuns(problem, element_bytes);
  return fits_tables && !suits_runs ? Strategy::kPrivateTable
                                    : ChooseOrderedStrategy(problem, element_bytes, indices_are_sorted);
}

// `unit`: the vectors that stay in one block of columns.
inline RowGrid MakeRowGrid(const Problem& problem, Strategy strategy, int vector, int unit) {
  RowGrid grid;
  grid.problem = problem;
  if (strategy == Strategy::kSortThenTiles) {
    grid.problem.batch = 1;
    grid.problem.rows = problem.batch * problem.rows;
    grid.problem.segments = problem.batch * problem.segments;
  }
  if (strategy == Strategy::kRuns) {
    grid.features = {1, 1};
    grid.groups = 0;
    grid.blocks_per_batch = CeilDivide(problem.rows, RunBlockRows(problem.features));
  } else {
    grid.features = AssignFeatures(problem.features / vector, 32, unit);
    if (strategy == Strategy::kFewSortedRows) {
      grid.groups = FewSortedRowGroups(grid.features);
      grid.blocks_per_batch = FewSortedRowBlocks(problem.rows, grid.groups);
    } else {
      const bool is_small = strategy == Strategy::kSmallTiles;
      grid.groups = (is_small ? kSmallTileThreads : TileThreads(grid.features.lanes)) / grid.features.lanes;
      const int64_t block_rows = is_small ? RowsOfSmallStep(grid.features) : int64_t{grid.groups} * kTileRows;
      grid.blocks_per_batch = CeilDivide(grid.problem.rows, block_rows);
    }
  }
  grid.row_blocks = grid.problem.batch * grid.blocks_per_batch;
  return grid;
}

// How a reduction runs, from shapes and flags alone.
struct ReducePlan {
  Strategy strategy;
  int64_t elements_at_once;  // batch elements per launch
  int64_t part_features;     // features per part of a row (a head, or the row) that vectors must not cross
  int64_t state_bytes;       // maximum size of an accumulator per cell
  RowGrid grid;              // of one launch
  int64_t scratch_bytes;
  int64_t shared_tables = 0;  // of kSharedTable: blocks per batch element

  Plan Summary() const { return {NameOf(kStrategyNames, strategy), scratch_bytes}; }

  // The only table of a batch element needs no table in global memory.
  bool StaysShared() const { return shared_tables == 1; }
};

inline ReducePlan MakeReducePlan(const Problem& problem, Strategy strategy, int64_t elements_at_once,
                                 int64_t part_features, int64_t element_bytes, int64_t state_bytes, int unit = 1) {
  ReducePlan plan{strategy, elements_at_once, part_features, state_bytes, {}, 0};
  Problem at_once = problem;
  at_once.batch = elements_at_once;
  ScratchSizes sizes;
  switch (strategy) {
    case Strategy::kNothing:
    case Strategy::kFill:
    case Strategy::kBatchOfFewRows:
    case Strategy::kFewUnsortedRows:
      return plan;
    case Strategy::kPrivateTable:
      sizes.Add(int64_t{kMaxPrivateBlocks} * problem.segments * problem.features * state_bytes);
      plan.scratch_bytes = sizes.total;
      return plan;
    default:
      break;
  }
  plan.grid = MakeRowGrid(at_once, strategy, RowVector(part_features, element_bytes), unit);
  if (strategy == Strategy::kFewSortedRows || strategy == Strategy::kSmallTiles) return plan;
  if (strategy == Strategy::kSortThenTiles) sizes.Add(SegmentOrderScratchBytes(at_once, /*holds_order=*/true));
  sizes.Add(2 * sizeof(uint32_t));
  sizes.Add(plan.grid.row_blocks * sizeof(uint32_t));
  sizes.Add(plan.grid.row_blocks * problem.features * state_bytes);
  sizes.Add(plan.grid.row_blocks * problem.features * state_bytes);
  plan.scratch_bytes = sizes.total;
  return plan;
}

// For rows of the data. Sorting numbers rows and segments in 32 bits. If the whole batch is too large for that, its
// elements are reduced one by one.
inline ReducePlan MakeReducePlan(const Problem& problem, Strategy strategy, int64_t element_bytes,
                                 int64_t state_bytes) {
  const bool is_split = strategy == Strategy::kSortThenTiles && !OrderFits(problem);
  return MakeReducePlan(problem, strategy, is_split ? 1 : problem.batch, problem.features, element_bytes, state_bytes);
}

// For atomics on tables. Unless a cell of a table has the type of the result, the table in global memory is scratch.
inline ReducePlan MakeTablePlan(const Problem& problem, Strategy strategy, int64_t shared_tables, int64_t element_bytes,
                                int64_t cell_bytes) {
  ReducePlan plan{};
  plan.strategy = strategy;
  plan.shared_tables = shared_tables;
  ScratchSizes sizes;
  if (cell_bytes != element_bytes && !plan.StaysShared()) {
    sizes.Add(problem.NumCells() * cell_bytes);
  }
  plan.scratch_bytes = sizes.total;
  return plan;
}

// Number of blocks that fill wide gaps.
inline uint32_t GapBlocks(const Problem& problem, int threads) {
  return GridSize(CeilDivide(problem.batch * GapWarpsPerBatch(problem), threads / 32));
}

// Only tiles and the kernel of few unsorted rows read pairs of rows. `uses_order`: whether the kernel is one for sorted
// rows.
inline ReducePlan PlanPairs(const SegmentCall& call, bool uses_order, int64_t state_bytes) {
  const Problem& problem = call.problem;
  const int64_t element_bytes = ElementBytes(call.type);
  const Strategy strategy = problem.HasNoResult() ? Strategy::kNothing
                            : problem.rows == 0   ? Strategy::kFill
                            : uses_order          ? Strategy::kTiles
                                                  : ChooseUnsortedStrategy(problem);
  return MakeReducePlan(problem, strategy, element_bytes, state_bytes);
}

// Input is OwnRows, or RowPairs, or says how rows are gathered from another array (see gathering.cuh).
template <typename Reduction, typename Input>
struct Reducer {
  using T = typename Reduction::Element;
  static constexpr bool kIsPlain = std::is_same_v<Input, OwnRows<T>>;
  static constexpr bool kGathers = std::is_base_of_v<Edges, Input>;

  const SegmentCall& call;
  const ReducePlan& plan;
  const T* data;
  const Input& input;
  const typename Reduction::Outputs& outputs;
  cudaStream_t stream;

  const Problem& problem = call.problem;
  const RowGrid& grid = plan.grid;

  CudaStatus Launch() const {
    switch (plan.strategy) {
      case Strategy::kFill:
        return LaunchFill<Reduction>(outputs, 0, problem.batch * problem.segments, problem.features, stream);
      case Strategy::kPrivateTable:
        if constexpr (kAllowsPrivateTable<Reduction> && kIsPlain) return PrivateTable();
        return JB_CUDA_STATUS(cudaErrorInvalidValue);
      case Strategy::kBatchOfFewRows:
        if constexpr (kIsPlain) return BatchOfFewRows();
        return JB_CUDA_STATUS(cudaErrorInvalidValue);
      default:
        for (int64_t b = 0; b < problem.batch; b += plan.elements_at_once) JB_RETURN_IF_CUDA_ERROR(ElementsFrom(b));
        return {};
    }
  }

 private:
  CudaStatus PrivateTable() const {
    using Cells = typename Reduction::template Accumulator<1>;
    PrivateTableArguments<Reduction> a{};
    a.data = data;
    a.ids = {call.segment_ids, call.ids_are_64_bit, problem.segments};
    a.problem = problem;
    a.outputs = outputs;
    a.partials = call.scratch;
    const auto kernel = PrivateTableKernel<Reduction>;
    int multiprocessors = 0, max_shared_bytes = 0;
    JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
    JB_RETURN_IF_CUDA_ERROR(AllowSharedMemory(kernel, &max_shared_bytes));
    const int64_t warp_bytes = PrivateWarpBytes(problem.segments, sizeof(Cells));
    const int64_t fitting_warps = max_shared_bytes / warp_bytes;
    const int warps = static_cast<int>(fitting_warps < kMaxPrivateWarps ? fitting_warps : kMaxPrivateWarps);
    const int64_t wanted = CeilDivide(multiprocessors, problem.batch), max_blocks = kMaxPrivateBlocks / problem.batch;
    const int64_t paying = CeilDivide(problem.rows * problem.features, kMinPrivateElements);
    a.blocks_per_batch = static_cast<int>(std::min({wanted, max_blocks, paying}));
    const int shared_bytes = static_cast<int>(warps * warp_bytes);
    kernel<<<GridSize(problem.batch * a.blocks_per_batch), 32 * warps, shared_bytes, stream>>>(a);
    JB_RETURN_IF_LAUNCH_ERROR(PrivateTableKernel);
    const int64_t cells = problem.NumCells();
    MergePartialsKernel<Reduction>
        <<<GridSize(CeilDivide(cells, kPartialCells)), kPartialCells * kPartialSlices, 0, stream>>>(a);
    return JB_LAUNCH_STATUS(MergePartialsKernel);
  }

  CudaStatus BatchOfFewRows() const {
    int multiprocessors = 0;
    JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
    return DispatchVector([&](auto vector) {
      constexpr int kVec = decltype(vector)::value;
      FewRowBatchArguments<Reduction> a{data,
                                        {call.segment_ids, call.ids_are_64_bit, problem.segments},
                                        problem,
                                        outputs,
                                        FewRowBatchGrid(problem, sizeof(T))};
      const FeatureLanes& columns = a.grid.features;
      a.chunk_row_vectors = static_cast<int>(columns.columns == 1 ? problem.features / kVec
                                                                  : columns.lanes * (kVectorBytes / sizeof(T)) / kVec);
      a.by_row = ShortDivider(a.chunk_row_vectors);
      a.by_element = ShortDivider(problem.segments * a.chunk_row_vectors);
      a.by_lanes = ShortDivider(columns.lanes);
      const auto kernel = FewRowBatchKernel<Reduction, kVec>;
      JB_RETURN_IF_CUDA_ERROR(AllowSharedMemory(kernel));
      const uint32_t blocks = GridSize(std::min(a.grid.chunks, int64_t{kFewRowBatchBlocks} * multiprocessors));
      kernel<<<blocks, kFewRowThreads, FewRowBatchBytes(problem), stream>>>(a);
      return JB_LAUNCH_STATUS(FewRowBatchKernel);
    });
  }

  // The batch elements of one launch, starting at `first`.
  CudaStatus ElementsFrom(int64_t first) const {
    const Strategy strategy = plan.strategy;
    Problem part = problem;
    part.batch = plan.elements_at_once;
    const int64_t first_id = problem.IdIndex(first, 0);
    const void* const ids = static_cast<const char*>(call.segment_ids) + first_id * (call.ids_are_64_bit ? 8 : 4);
    ScratchCarver carver(call.scratch);
    InputArguments<Reduction, Input> a{};
    static_cast<RowGrid&>(a) = grid;
    if (strategy == Strategy::kSortThenTiles) {
      char* order_scratch = carver.Take<char>(SegmentOrderScratchBytes(part, /*holds_order=*/true));
      SegmentOrder order;
      JB_RETURN_IF_CUDA_ERROR(LaunchSegmentOrder(part, ids, call.ids_are_64_bit, order_scratch, &order, stream));
      a.sorted_segments = order.segments;
      a.order = order.rows;
    }
    a.input = input;
    if constexpr (!kIsPlain) a.input.Advance(first, problem.rows, problem.features);
    if constexpr (kGathers) {
      a.data = data + (problem.data_is_shared ? 0 : first * input.num_rows * problem.features);
    } else {
      a.data = data + problem.DataRow(first, 0) * problem.features;
    }
    a.ids = {ids, call.ids_are_64_bit, problem.segments};
    a.batch_rows = problem.rows;
    a.first_segment = first * problem.segments;
    a.outputs = outputs;
    if constexpr (kGathers) {
      if (strategy == Strategy::kSmallTiles) return SmallTiles(a);
    } else {
      if (strategy == Strategy::kFewUnsortedRows) return FewUnsortedRows(part, a);
    }
    const bool fills_first = FillsFirst(part);
    if (fills_first) {
      JB_RETURN_IF_CUDA_ERROR(
          LaunchFill<Reduction>(outputs, a.first_segment, part.batch * problem.segments, problem.features, stream));
    }
    if constexpr (kIsPlain || kGathers) {
      if (strategy == Strategy::kFewSortedRows) return FewSortedRows(a, !fills_first);
    }
    a.merge_counters = carver.Take<uint32_t>(2);
    a.carries.in_segment = carver.Take<uint32_t>(grid.row_blocks);
    a.carries.in = carver.Take<char>(grid.row_blocks * problem.features * plan.state_bytes);
    a.carries.out = carver.Take<char>(grid.row_blocks * problem.features * plan.state_bytes);
    if (!fills_first) {
      a.gap_blocks = GapBlocks(a.problem, strategy == Strategy::kRuns ? kRunThreads : TileThreads(grid.features.lanes));
    }
    if constexpr (kGathers) {
      return DispatchVector([&](auto vector) { return Tiles<decltype(vector)::value, RowSource::kGathered>(a); });
    } else {
      if constexpr (kIsPlain) {
        if (strategy == Strategy::kRuns) return Runs(a);
      }
      return DispatchVector([&](auto vector) {
        constexpr int kVec = decltype(vector)::value;
        return strategy == Strategy::kSortThenTiles ? Tiles<kVec, RowSource::kOrdered>(a)
                                                    : Tiles<kVec, RowSource::kDirect>(a);
      });
    }
  }

  // Calls launch(vector) with the elements of a vector of a row.
  template <typename LaunchOf>
  CudaStatus DispatchVector(const LaunchOf& launch) const {
    if constexpr (kOnlyWidestVectors<Reduction>) {
      return launch(std::integral_constant<int, WidestVectorBytes(sizeof(T)) / static_cast<int>(sizeof(T))>{});
    } else {
      return DispatchRowVector<T>(plan.part_features, launch);
    }
  }

  CudaStatus Runs(const TileArguments<Reduction>& a) const {
    switch (problem.features) {
      case 1:
        return Runs<1>(a);
      case 2:
        return Runs<2>(a);
      case 4:
        return Runs<4>(a);
      default:
        return Runs<8>(a);
    }
  }

  template <int kFeatures>
  CudaStatus Runs(const TileArguments<Reduction>& a) const {
    if constexpr (kFeatures * sizeof(T) > 32) {
      return JB_CUDA_STATUS(cudaErrorInvalidValue);
    } else {
      const uint32_t blocks = GridSize(a.gap_blocks + grid.row_blocks);
      RunKernel<Reduction, kFeatures><<<blocks, kRunThreads, 0, stream>>>(a);
      JB_RETURN_IF_LAUNCH_ERROR(RunKernel);
      return LaunchMerge<kFeatures>(a);
    }
  }

  template <int kVec, RowSource kSource>
  CudaStatus Tiles(const InputArguments<Reduction, Input>& a) const {
    const int shared_bytes = TileShared<Reduction, Input, kVec, kSource>::Bytes(grid.groups);
    const int64_t blocks = a.gap_blocks + grid.row_blocks * grid.features.columns;
    const int threads = TileThreads(grid.features.lanes);
    TileKernel<Reduction, Input, kVec, kSource><<<GridSize(blocks), threads, shared_bytes, stream>>>(a);
    JB_RETURN_IF_LAUNCH_ERROR(TileKernel);
    return LaunchMerge<kVec>(a);
  }

  CudaStatus FewUnsortedRows(const Problem& part, InputArguments<Reduction, Input> a) const {
    a.problem = part;
    return DispatchVector([&](auto vector) {
      constexpr int kVec = decltype(vector)::value;
      const FewUnsortedRowGrid few(part, kVec);
      const auto kernel = FewUnsortedRowKernel<Reduction, Input, kVec>;
      JB_RETURN_IF_CUDA_ERROR(AllowSharedMemory(kernel));
      const uint32_t blocks = GridSize(part.batch * few.blocks_per_batch * few.features.columns);
      kernel<<<blocks, kFewRowThreads, FewUnsortedRowBytes<Reduction, kVec>(part, few), stream>>>(a, few);
      return JB_LAUNCH_STATUS(FewUnsortedRowKernel);
    });
  }

  CudaStatus FewSortedRows(const InputArguments<Reduction, Input>& a, bool fills_gaps) const {
    const uint32_t blocks = GridSize(grid.row_blocks * grid.features.columns);
    return DispatchVector([&](auto vector) {
      FewSortedRowKernel<Reduction, Input, decltype(vector)::value>
          <<<blocks, kFewSortedRowThreads, 0, stream>>>(a, fills_gaps);
      return JB_LAUNCH_STATUS(FewSortedRowKernel);
    });
  }

  CudaStatus SmallTiles(InputArguments<Reduction, Input> a) const {
    a.gap_blocks = GapBlocks(a.problem, kSmallTileThreads);
    const uint32_t blocks = GridSize(a.gap_blocks + grid.row_blocks * grid.features.columns);
    return DispatchVector([&](auto vector) {
      constexpr int kVec = decltype(vector)::value;
      SmallTileKernel<Reduction, Input, kVec><<<blocks, kSmallTileThreads, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(SmallTileKernel);
    });
  }

  template <int kVec>
  CudaStatus LaunchMerge(TileArguments<Reduction> a) const {
    if (grid.blocks_per_batch == 1) return {};  // no run leaves its block
    const int64_t blocks = CeilDivide(grid.row_blocks, kMergeCarries) * grid.features.columns;
    a.merge_parts = static_cast<int>(MergeParts(blocks));
    MergeKernel<Reduction, kVec><<<GridSize(blocks * a.merge_parts), kMergeThreads, 0, stream>>>(a);
    return JB_LAUNCH_STATUS(MergeKernel);
  }
};

// `call` is the call of an op.
template <typename Reduction, typename Call, typename Input = OwnRows<typename Reduction::Element>>
CudaStatus LaunchReduction(const Call& call, const ReducePlan& plan, const typename Reduction::Outputs& outputs,
                           cudaStream_t stream, const Input& input = {}) {
  using T = typename Reduction::Element;
  using Launch = Reducer<Reduction, Input>;
  if (plan.strategy == Strategy::kNothing) return {};
  bool fits = SegmentsFit(call.problem.segments) && FeaturesFit(call.problem.features) &&
              call.scratch_bytes >= plan.scratch_bytes;
  if constexpr (Launch::kGathers) fits = fits && SegmentsFit(input.num_rows);
  if (!fits) return JB_CUDA_STATUS(cudaErrorInvalidValue);
  return Launch{call, plan, static_cast<const T*>(call.data), input, outputs, stream}.Launch();
}

// State bytes per cell of ops that accumulate a 32- or 64-bit number and a 32-bit word.
inline int64_t PairStateBytes(ElementType type) { return 2 * AccumulatorBytes(type); }

// For ops that always use ChooseStrategy.
inline ReducePlan PlanByRule(const SegmentCall& call, int64_t state_bytes) {
  const int64_t element_bytes = ElementBytes(call.type);
  const Strategy strategy = ChooseStrategy(call.problem, element_bytes, state_bytes, call.indices_are_sorted);
  return MakeReducePlan(call.problem, strategy, element_bytes, state_bytes);
}

// ---- Edges, each of which reads the row of another array that its gather id names.

// Edges are in segment order. Neighbouring threads read a gathered row as whole vectors, of which `unit` stay in one
// block of columns.
inline Strategy StrategyOfEdges(const Problem& problem, int64_t vector, int unit, int64_t max_edges_of_small_tiles) {
  if (problem.HasNoResult()) return Strategy::kNothing;
  if (problem.rows == 0) return Strategy::kFill;
  const FeatureLanes features = AssignFeatures(problem.features / vector, 32, unit);
  const int64_t blocks = problem.batch * FewSortedRowBlocks(problem.rows, FewSortedRowGroups(features));
  if (blocks * features.columns <= Tuning::kMaxBlocksOfFewEdges && UsesFewSortedRows(problem, features)) {
    return Strategy::kFewSortedRows;
  }
  return UsesSmallTiles(problem, max_edges_of_small_tiles) ? Strategy::kSmallTiles : Strategy::kTiles;
}

// A vector does not cross a part of `part_features` features.
inline ReducePlan PlanGathered(const GatheringCall& call, int64_t part_features, int64_t state_bytes) {
  const Problem& problem = call.problem;
  const int64_t vector = RowVector(part_features, ElementBytes(call.type));
  const Strategy strategy = StrategyOfEdges(problem, vector, /*unit=*/1, Tuning::kMaxRowsOfSmallTiles);
  // Kernels number edges and gathered rows of all batch elements together in 32 bits.
  const bool fits = OrderFits(problem) && problem.batch * call.num_rows < static_cast<int64_t>(kDropped);
  return MakeReducePlan(problem, strategy, fits ? problem.batch : 1, part_features, ElementBytes(call.type),
                        state_bytes);
}

// The edges of a call. Gather ids out of range name the nearest row if `clips`, otherwise no row.
inline Edges EdgesOf(const GatheringCall& call, bool clips) {
  return {static_cast<const int32_t*>(call.gather_ids.data), call.gather_ids.is_shared, clips, call.num_rows,
          static_cast<const int32_t*>(call.edge_order.data), call.edge_order.is_shared};
}

}  // namespace jax_baracuda::segment
