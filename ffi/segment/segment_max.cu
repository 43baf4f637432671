#include "ffi/segment/segment_max.cuh"

#include "ffi/segment/scratch.h"
#include "ffi/segment/segment_max_order.cuh"
#include "ffi/segment/segment_max_table.cuh"
#include "ffi/segment/segment_max_tiles.cuh"

namespace jax_baracuda::segment {
namespace {

enum class Algorithm {
  kFill,         // there are no rows
  kTiles,        // rows in order, reduced in registers
  kOrderTiles,   // rows brought into order first
  kTable,        // atomic maxima on a table in global memory
  kSharedTable,  // one table per block in shared memory
};

struct Plan {
  Algorithm algorithm;
  bool stages_rows;   // for tiles: rows too narrow for whole-vector loads pass through shared memory
  bool filters_rows;  // for a table in global memory: rows pass floors in shared memory first
};

int64_t ElementBytes(ElementType type) {
  int64_t bytes = 0;
  DispatchOrdered(type, [&](auto tag) { bytes = sizeof(typename decltype(tag)::type); });
  return bytes;
}

int64_t KeyBytes(int64_t element_bytes) { return element_bytes == 8 ? 8 : 4; }

constexpr int64_t kSectorBytes = 32;
constexpr int64_t kSharedTableBytes = 48 * 1024;

bool FiltersRows(const Problem& problem, int64_t element_bytes, bool indices_are_sorted) {
  const int64_t cells = problem.segments * problem.features;
  const bool outgrows_l1 = cells >= (int64_t{1} << 16);
  const bool has_many_rows = problem.rows >= (int64_t{1} << 24) && problem.rows / 32 >= problem.segments;
  return KeyBytes(element_bytes) == sizeof(uint32_t) && !indices_are_sorted && problem.batch == 1 &&
         problem.features <= 8 && outgrows_l1 && cells < (int64_t{1} << 31) && has_many_rows;
}

// The rule, from shapes and flags alone:
//
//   * Few segments, so that a table of all cells fits in shared memory and each block has many rows for each of its
//     cells: a shared table. It does not mind the order of the rows. With winners it reads the data twice, so that rows
//     in order rather take tiles.
//   * Rows in order: tiles, which read everything once. Rows of less than a sector pass through shared memory; those of
//     one element, which a warp reduces by runs before it touches a table, need no tiles unless for winners.
//   * Rows in any order: bring them into order, then tiles. That costs a sort of the ids, whatever the width of the
//     rows; the alternative is an atomic, or at least a load, for each element on a table. So narrow rows, and problems
//     that are over before a sort has been launched, take the table.
//     The table filters the rows where it is larger than an L1, so that a look at it is dear, and has so many rows to a
//     cell that most of them come after a greater one of their cell.
//   * The order numbers rows and segments of the whole batch in 32 bits; beyond that, the table.
Plan ChoosePlan(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool with_winner) {
  if (problem.rows == 0) return {Algorithm::kFill, false, false};
  const int64_t row_bytes = problem.features * element_bytes;
  const bool is_narrow = row_bytes < kSectorBytes;

  const int64_t cell_bytes = KeyBytes(element_bytes) + (with_winner ? sizeof(int32_t) : 0);
  const bool fits_shared = problem.segments <= kSharedTableBytes / cell_bytes &&
                           problem.segments * problem.features <= kSharedTableBytes / cell_bytes;
  const bool has_few_segments = problem.rows / 4096 >= problem.segments;
  if (fits_shared && has_few_segments && !(indices_are_sorted && with_winner)) {
    return {Algorithm::kSharedTable, false, false};
  }
  if (indices_are_sorted && (problem.features > 1 || with_winner)) return {Algorithm::kTiles, is_narrow, false};
  const bool is_small = problem.batch * problem.rows * row_bytes <= (int64_t{1} << (with_winner ? 23 : 26));
  if (row_bytes <= kSectorBytes || is_small || !OrderFits(problem)) {
    return {Algorithm::kTable, false, FiltersRows(problem, element_bytes, indices_are_sorted)};
  }
  return {Algorithm::kOrderTiles, false, false};
}

// How tiles are dealt to blocks.
struct TileGrid {
  Problem problem;  // the batch joined into one element where rows are brought into order
  FeatureLanes features;
  int groups;
  int64_t blocks_per_batch;
  int64_t row_blocks;
};

TileGrid MakeTileGrid(const Problem& problem, const Plan& plan, int64_t element_bytes) {
  TileGrid grid;
  grid.problem = problem;
  if (plan.algorithm == Algorithm::kOrderTiles) {
    grid.problem.batch = 1;
    grid.problem.rows = problem.batch * problem.rows;
    grid.problem.segments = problem.batch * problem.segments;
  }
  const int vector = plan.stages_rows ? 1 : RowVector(problem.features, element_bytes);
  grid.features = DealFeatures(problem.features / vector, 32);
  grid.groups = kTileThreads / grid.features.lanes;
  grid.blocks_per_batch = CeilDivide(grid.problem.rows, static_cast<int64_t>(grid.groups) * kTileRows);
  grid.row_blocks = grid.problem.batch * grid.blocks_per_batch;
  return grid;
}

int64_t ScratchBytes(const Problem& problem, const Plan& plan, int64_t element_bytes, bool with_winner) {
  const int64_t cells = problem.batch * problem.segments * problem.features;
  ScratchSizes sizes;
  switch (plan.algorithm) {
    case Algorithm::kFill:
      break;
    case Algorithm::kOrderTiles:
      sizes.Add(SegmentOrderScratchBytes(problem));
      [[fallthrough]];
    case Algorithm::kTiles: {
      const TileGrid grid = MakeTileGrid(problem, plan, element_bytes);
      sizes.Add(problem.batch * problem.segments);
      sizes.Add(grid.row_blocks * sizeof(uint32_t));
      sizes.Add(grid.row_blocks * problem.features * element_bytes);
      if (with_winner) sizes.Add(grid.row_blocks * problem.features * sizeof(int32_t));
      break;
    }
    case Algorithm::kTable:
    case Algorithm::kSharedTable:
      // Where keys are as wide as values the output itself is the table.
      if (KeyBytes(element_bytes) != element_bytes) sizes.Add(cells * KeyBytes(element_bytes));
      if (plan.filters_rows) sizes.Add(kFloorBytes);
      break;
  }
  return sizes.total;
}

template <typename T, bool kWithWinner>
struct Launcher {
  const SegmentMaxArguments& arguments;
  const Plan plan;
  cudaStream_t stream;

  const T* data = static_cast<const T*>(arguments.data);
  T* output = static_cast<T*>(arguments.output);
  const Problem& problem = arguments.problem;
  const int64_t segments = problem.batch * problem.segments;

  cudaError_t Launch() const {
    switch (plan.algorithm) {
      case Algorithm::kFill:
        return FillAll();
      case Algorithm::kTiles:
      case Algorithm::kOrderTiles:
        return Tiles();
      default:
        return Table();
    }
  }

  cudaError_t FillAll() const {
    return DispatchRowVector<T>(problem.features, [&](auto vector) {
      constexpr int kVec = decltype(vector)::value;
      TileArguments<T> a{};
      a.problem = problem;
      a.output = output;
      a.winner = arguments.winner;
      a.features = DealFeatures(problem.features / kVec, 32);
      return LaunchFinish<kVec>(a, 0);
    });
  }

  cudaError_t Tiles() const {
    ScratchCarver carver(arguments.scratch);
    TileArguments<T> a{};
    if (plan.algorithm == Algorithm::kOrderTiles) {
      char* order_scratch = carver.Take<char>(SegmentOrderScratchBytes(problem));
      SegmentOrder order;
      if (cudaError_t e = LaunchSegmentOrder(problem, arguments.segment_ids, arguments.ids_are_64_bit, order_scratch,
                                             &order, stream)) {
        return e;
      }
      a.sorted_segments = order.segments;
      a.order = order.rows;
    }
    const TileGrid grid = MakeTileGrid(problem, plan, sizeof(T));
    a.data = data;
    a.ids = {arguments.segment_ids, arguments.ids_are_64_bit, problem.segments};
    a.problem = grid.problem;
    a.batch_rows = problem.rows;
    a.first_wins = arguments.first_wins;
    a.output = output;
    a.winner = arguments.winner;
    a.present = carver.Take<uint8_t>(segments);
    a.pieces.segment = carver.Take<uint32_t>(grid.row_blocks);
    a.pieces.best = carver.Take<T>(grid.row_blocks * problem.features);
    a.pieces.winner = kWithWinner ? carver.Take<int32_t>(grid.row_blocks * problem.features) : nullptr;
    a.features = grid.features;
    a.groups = grid.groups;
    a.blocks_per_batch = grid.blocks_per_batch;
    if (cudaError_t e = cudaMemsetAsync(a.present, 0, segments, stream)) return e;
    if (plan.stages_rows) return LaunchTiles<1, RowSource::kStaged>(a, grid);
    return DispatchRowVector<T>(problem.features, [&](auto vector) {
      constexpr int kVec = decltype(vector)::value;
      return a.order != nullptr ? LaunchTiles<kVec, RowSource::kOrdered>(a, grid)
                                : LaunchTiles<kVec, RowSource::kDirect>(a, grid);
    });
  }

  template <int kVec, RowSource kSource>
  cudaError_t LaunchTiles(const TileArguments<T>& a, const TileGrid& grid) const {
    const int shared_bytes =
        TileShared<T, kVec, kWithWinner, kSource>::Bytes(grid.groups, problem.features);
    const int64_t blocks = grid.row_blocks * grid.features.columns;
    TileKernel<T, kVec, kWithWinner, kSource>
        <<<static_cast<uint32_t>(blocks), kTileThreads, shared_bytes, stream>>>(a);
    if (cudaError_t e = cudaGetLastError()) return e;
    const int64_t windows = CeilDivide(grid.row_blocks, kMergeWindow);
    MergeWindowsKernel<T, kVec, kWithWinner>
        <<<static_cast<uint32_t>(windows * grid.features.columns), kMergeThreads, 0, stream>>>(a, grid.row_blocks);
    if (cudaError_t e = cudaGetLastError()) return e;
    return LaunchFinish<kVec>(a, grid.row_blocks);
  }

  template <int kVec>
  cudaError_t LaunchFinish(const TileArguments<T>& a, int64_t slots) const {
    const int64_t windows = CeilDivide(slots, kMergeWindow);
    // A single window leaves nothing to merge.
    const int64_t merge_blocks = windows > 1 ? CeilDivide(windows, kMergeWindow) * a.features.columns : 0;
    const int64_t fill_blocks = CeilDivide(segments, kFillSegments) * a.features.columns;
    FinishKernel<T, kVec, kWithWinner><<<static_cast<uint32_t>(merge_blocks + fill_blocks), kMergeThreads, 0, stream>>>(
        a, slots, merge_blocks);
    return cudaGetLastError();
  }

  cudaError_t Table() const {
    const int64_t cells = segments * problem.features;
    ScratchCarver carver(arguments.scratch);
    TableArguments<T> a{};
    a.data = data;
    a.ids = {arguments.segment_ids, arguments.ids_are_64_bit, problem.segments};
    a.problem = problem;
    a.first_wins = arguments.first_wins;
    if constexpr (sizeof(TableKey<T>) == sizeof(T)) {
      a.table = reinterpret_cast<TableKey<T>*>(output);
    } else {
      a.table = carver.Take<TableKey<T>>(cells);
    }
    a.output = output;
    a.winner = arguments.winner;
    // Vectors are cut from an element of the batch as a whole, so only its beginning has to be aligned.
    constexpr int kWidest = sizeof(T) == 8 ? 2 : 4;
    const bool is_aligned = problem.batch == 1 || problem.data_is_shared ||
                            problem.rows * problem.features % kWidest == 0;
    if (cudaError_t e = cudaMemsetAsync(a.table, 0, cells * sizeof(TableKey<T>), stream)) return e;
    if (cudaError_t e = plan.filters_rows ? FilteredMax<kWidest>(a, carver.Take<char>(kFloorBytes))
                        : is_aligned      ? TableMax<kWidest>(a)
                                          : TableMax<1>(a)) {
      return e;
    }
    DecodeTableKernel<T><<<static_cast<uint32_t>(CeilDivide(cells, 256)), 256, 0, stream>>>(a.table, cells, output);
    if (cudaError_t e = cudaGetLastError()) return e;
    if constexpr (kWithWinner) {
      // Every byte of kNoWinner is 0xff.
      if (cudaError_t e = cudaMemsetAsync(a.winner, 0xff, cells * sizeof(int32_t), stream)) return e;
      return is_aligned ? TableWinner<kWidest>(a) : TableWinner<1>(a);
    }
    return cudaSuccess;
  }

  // The first rows go straight to the table; the others in parts, each behind the floors that the rows before it leave.
  template <int kVec>
  cudaError_t FilteredMax(const TableArguments<T>& a, char* scratch) const {
    if constexpr (sizeof(TableKey<T>) != sizeof(uint32_t)) {
      return cudaErrorInvalidValue;
    } else {
      const Floors<T> floors(reinterpret_cast<FloorKey<T>*>(scratch), problem.segments * problem.features);
      const uint32_t blocks = static_cast<uint32_t>(kFilterBlocks * Multiprocessors());
      // In 1/64 of the rows. What the floors let pass falls as the inverse of the number of rows before.
      constexpr int kPartEnds[] = {4, 10, 26, 64};
      int64_t begin = 0;
      for (const int part_end : kPartEnds) {
        // Parts begin at multiples of 64 rows, to stay aligned.
        const int64_t end = part_end == 64 ? problem.rows : problem.rows / (64 * 64) * 64 * part_end;
        TableArguments<T> part = a;
        part.data = data + begin * problem.features;
        part.ids.ids = static_cast<const char*>(a.ids.ids) + begin * (a.ids.are_64_bit ? 8 : 4);
        part.problem.rows = end - begin;
        if (begin == 0) {
          if (cudaError_t e = TableMax<kVec>(part)) return e;
        } else {
          constexpr uint32_t kFloorBlocks = Floors<T>::kGroups * kFloorLanes / 256;
          FloorsKernel<T><<<kFloorBlocks, 256, 0, stream>>>(a.table, floors);
          if (cudaError_t e = cudaGetLastError()) return e;
          part.blocks_per_batch = blocks;
          FilteredMaxKernel<T, kVec><<<blocks, kFilterThreads, 0, stream>>>(part, floors);
          if (cudaError_t e = cudaGetLastError()) return e;
        }
        begin = end;
      }
      return cudaSuccess;
    }
  }

  // Blocks enough to fill any GPU several times over, but no more than there is work for.
  int64_t TableBlocksPerBatch(int64_t vectors, int threads, int64_t most_blocks) const {
    const int64_t blocks = CeilDivide(vectors, threads);
    const int64_t most = CeilDivide(most_blocks, problem.batch);
    return blocks < most ? blocks : most;
  }

  // As many as run at once: each keeps its table for all of its rows.
  static int64_t SharedTableBlocks() { return kSharedTableBlocks * Multiprocessors(); }

  static int64_t Multiprocessors() {
    int device = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return multiprocessors;
  }

  template <int kVec>
  cudaError_t TableMax(TableArguments<T> a) const {
    const int64_t vectors = CeilDivide(a.problem.rows * problem.features, kVec);
    if (plan.algorithm == Algorithm::kSharedTable) {
      a.blocks_per_batch = TableBlocksPerBatch(vectors, kSharedTableThreads, SharedTableBlocks());
      const size_t shared_bytes = problem.segments * problem.features * sizeof(TableKey<T>);
      SharedTableMaxKernel<T, kVec><<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch), kSharedTableThreads,
                                      shared_bytes, stream>>>(a);
    } else if (problem.features == 1) {
      a.blocks_per_batch = CeilDivide(vectors, kSingleFeatureThreads);
      const uint32_t blocks = static_cast<uint32_t>(problem.batch * a.blocks_per_batch);
      if (arguments.indices_are_sorted) {
        SingleFeatureMaxKernel<T, kVec, true><<<blocks, kSingleFeatureThreads, 0, stream>>>(a);
      } else {
        SingleFeatureMaxKernel<T, kVec, false><<<blocks, kSingleFeatureThreads, 0, stream>>>(a);
      }
    } else {
      a.blocks_per_batch = TableBlocksPerBatch(vectors, 256, int64_t{1} << 20);
      TableMaxKernel<T, kVec><<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch), 256, 0, stream>>>(a);
    }
    return cudaGetLastError();
  }

  template <int kVec>
  cudaError_t TableWinner(TableArguments<T> a) const {
    const int64_t vectors = CeilDivide(problem.rows * problem.features, kVec);
    if (plan.algorithm == Algorithm::kSharedTable) {
      a.blocks_per_batch = TableBlocksPerBatch(vectors, kSharedTableThreads, SharedTableBlocks());
      const size_t shared_bytes =
          problem.segments * problem.features * (sizeof(ComputeType<T>) + sizeof(int32_t));
      SharedTableWinnerKernel<T, kVec><<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch),
                                         kSharedTableThreads, shared_bytes, stream>>>(a);
    } else {
      a.blocks_per_batch = TableBlocksPerBatch(vectors, 256, int64_t{1} << 20);
      TableWinnerKernel<T, kVec><<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch), 256, 0, stream>>>(a);
    }
    return cudaGetLastError();
  }
};

bool IsEmpty(const Problem& problem) {
  return problem.batch == 0 || problem.segments == 0 || problem.features == 0;
}

}  // namespace

int64_t SegmentMaxScratchBytes(const Problem& problem, int64_t element_bytes, bool indices_are_sorted,
                               bool with_winner) {
  if (IsEmpty(problem)) return 0;
  return ScratchBytes(problem, ChoosePlan(problem, element_bytes, indices_are_sorted, with_winner), element_bytes,
                      with_winner);
}

cudaError_t LaunchSegmentMax(const SegmentMaxArguments& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  if (IsEmpty(problem)) return cudaSuccess;
  const bool with_winner = arguments.winner != nullptr;
  const int64_t element_bytes = ElementBytes(arguments.type);
  const Plan plan = ChoosePlan(problem, element_bytes, arguments.indices_are_sorted, with_winner);
  cudaError_t error = cudaErrorInvalidValue;
  if (!SegmentsFit(problem.segments)) return error;
  if (arguments.scratch_bytes < ScratchBytes(problem, plan, element_bytes, with_winner)) return error;
  if (with_winner) {
    DispatchFloating(arguments.type, [&](auto tag) {
      error = Launcher<typename decltype(tag)::type, true>{arguments, plan, stream}.Launch();
    });
  } else {
    DispatchOrdered(arguments.type, [&](auto tag) {
      error = Launcher<typename decltype(tag)::type, false>{arguments, plan, stream}.Launch();
    });
  }
  return error;
}

}  // namespace jax_baracuda::segment
