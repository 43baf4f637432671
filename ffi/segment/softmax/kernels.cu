// Softmax and its gradient: the choice of a kernel.
#include <numeric>

#include "ffi/core/device_attributes.h"
#include "ffi/core/scratch.h"
#include "ffi/segment/engine/order.cuh"
#include "ffi/segment/engine/tuning.h"
#include "ffi/segment/softmax/call.h"
#include "ffi/segment/softmax/long_runs.cuh"
#include "ffi/segment/softmax/small.cuh"
#include "ffi/segment/softmax/table.cuh"
#include "ffi/segment/softmax/tiles.cuh"

namespace jax_baracuda::segment {
namespace {

enum class Strategy {
  kNothing,        // no result
  kFill,           // no segments: all rows are dropped
  kSmall,          // few rows in any order, in one launch (see small.cuh)
  kTiles,          // sorted rows (see tiles.cuh)
  kSortThenTiles,  // sorts the rows first, then tiles
  kTable,          // rows in any order (see table.cuh)
};

// Blocks for a small problem: about one per multiprocessor, or two if a warp would have more than two segments. (If
// that leaves more than kMaxSmallSegments per block, there are more blocks.)
int64_t SmallBlocks(int64_t segments, int64_t columns) {
  constexpr int64_t kBlocks = 128;
  return segments * columns > 2 * kBlocks * kSmallWarps ? 2 * kBlocks : kBlocks;
}

// Every block of a small problem reads all ids, which pays while other strategies are launch-bound. A block owns whole
// segments, so there should be enough of them, but not many more than rows. Sorted rows use tiles from fewer rows on,
// since a single block would have to process a long segment, and also if they are wide with few rows per segment.
bool IsSmall(const Problem& problem, bool indices_are_sorted) {
  const int64_t rows = problem.batch * problem.rows, segments = problem.batch * problem.segments;
  const bool is_wide = rows * problem.features >= Tuning::kMinElementsOfSortedTiles &&
                       rows <= Tuning::kMaxRowsToSegmentOfSortedTiles * segments;
  if (indices_are_sorted && (rows >= Tuning::kMinRowsOfSortedTiles || is_wide)) return false;
  return rows <= kMaxSmallRows && rows * problem.features <= Tuning::kMaxSmallElements &&
         rows <= Tuning::kMaxSmallRowsToSegment * segments && segments <= kMaxSmallRows;
}

// Slots of a block's cache for hot cells. A block must have at least kCacheUses vectors per slot.
constexpr int kMinCacheSlots = 512, kMaxCacheSlots = 4096, kCacheUses = 64;

int64_t ComputeBytes(int64_t element_bytes) { return element_bytes == 8 ? 8 : 4; }

int64_t TableBytes(const Problem& problem, int64_t element_bytes) {
  return problem.batch * problem.segments * problem.features * ComputeBytes(element_bytes);
}

// Depends on shapes and flags only. Sorting costs more than the passes over the table, unless rows are wide and the
// table of a batch element does not fit in L2 (batch elements are processed one after another). Atomic additions have
// no fixed order, so deterministic calls sort.
Strategy ChooseStrategy(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool deterministic) {
  if (problem.batch == 0 || problem.rows == 0 || problem.features == 0) return Strategy::kNothing;
  if (problem.segments == 0) return Strategy::kFill;
  if (IsSmall(problem, indices_are_sorted)) return Strategy::kSmall;
  if (indices_are_sorted) return Strategy::kTiles;
  const bool is_far = problem.features * element_bytes >= Tuning::kMinFarRowBytes &&
                      TableBytes(problem, element_bytes) / problem.batch >= Tuning::kMinFarTableBytes;
  return deterministic || is_far ? Strategy::kSortThenTiles : Strategy::kTable;
}

// How rows are cut into tiles.
struct SoftmaxTileGrid {
  int vector;
  FeatureLanes lanes;
  int own_rows, tile_rows;
  int64_t tiles;
};

SoftmaxTileGrid MakeSoftmaxTileGrid(int64_t rows, int64_t features, int64_t element_bytes, bool is_backward) {
  SoftmaxTileGrid grid;
  grid.vector = SoftmaxTileVector(features, element_bytes);
  grid.lanes = AssignFeatures(features / grid.vector, grid.vector > 1 ? 4 : kMaxSoftmaxTileLanes);
  const int thread_rows = ThreadRows(grid.vector, element_bytes, is_backward);
  grid.tile_rows = kSoftmaxTileWarps * (32 / grid.lanes.lanes) * thread_rows;
  // Tiles begin at a thread's first row, and at a 16-byte word if rows are contiguous.
  const int unit = std::lcm(thread_rows, static_cast<int>(16 / element_bytes));
  grid.own_rows = grid.tile_rows * 7 / 8 / unit * unit;
  grid.tiles = CeilDivide(rows, grid.own_rows);
  return grid;
}

// The grid that sums rows through a cache of hot cells in shared memory. `slots` is 0 if the cache does not pay.
struct CacheGrid {
  int64_t blocks_per_batch;
  int slots;
};

// As many blocks as are resident at once. Each must have so many rows that a small part of them fills the slots.
CacheGrid MakeCacheGrid(const Problem& problem, int vector, int64_t element_bytes, int multiprocessors) {
  CacheGrid cache;
  cache.blocks_per_batch = CeilDivide((element_bytes == 8 ? 1 : 2) * int64_t{multiprocessors}, problem.batch);
  const int64_t row_vectors = problem.features / vector;
  const int64_t block_vectors = problem.rows * row_vectors / cache.blocks_per_batch;
  const int64_t cells = problem.batch * problem.segments * row_vectors;
  cache.slots = 1;
  while (cache.slots < kMaxCacheSlots && cache.slots * kCacheUses <= block_vectors) cache.slots *= 2;
  const bool has_whole_rows = cache.blocks_per_batch * kSoftmaxCacheThreads >= row_vectors;
  if (cache.slots < kMinCacheSlots || cells >= kDropped || !has_whole_rows) cache.slots = 0;
  return cache;
}

// How rows are added to a table.
struct TableGrid {
  int vector;     // in elements
  int64_t parts;  // of the segments, whose sums are computed one after another (see Tuning::kPartBytes)
  CacheGrid cache;
};

TableGrid MakeTableGrid(const Problem& problem, int64_t element_bytes, int multiprocessors) {
  const int widest = static_cast<int>(16 / ComputeBytes(element_bytes));
  const int64_t table_bytes = TableBytes(problem, element_bytes);
  const bool is_split = problem.rows / Tuning::kMinRowsToPartSegment >= problem.segments &&
                        table_bytes <= Tuning::kMaxParts * Tuning::kPartBytes;
  TableGrid table;
  table.vector = problem.features % widest == 0 ? widest : 1;
  table.parts = is_split ? CeilDivide(table_bytes, Tuning::kPartBytes) : 1;
  table.cache = MakeCacheGrid(problem, table.vector, element_bytes, multiprocessors);
  return table;
}

// How a call runs. Scratch memory depends on shapes and flags alone, the name also on the number of multiprocessors.
struct SoftmaxPlan {
  Strategy strategy;
  int64_t elements_at_once;  // batch elements per launch of tiles
  SoftmaxTileGrid tiles;     // of one launch
  TableGrid table;
  int64_t scratch_bytes;

  Plan Summary() const { return {Name(), scratch_bytes}; }

 private:
  const char* Name() const {
    switch (strategy) {
      case Strategy::kNothing:
        return kNothing;
      case Strategy::kFill:
        return "fill";
      case Strategy::kSmall:
        return "one_launch";
      case Strategy::kTiles:
        return "tiles";
      case Strategy::kSortThenTiles:
        return "sort_then_tiles";
      case Strategy::kTable:
        if (table.parts > 1) return table.cache.slots > 0 ? "cached_atomics_in_parts" : "atomics_in_parts";
        return table.cache.slots > 0 ? "cached_atomics" : "atomics";
    }
    return "";
  }
};

SoftmaxPlan PlanOf(const SoftmaxCall& call) {
  const Problem& problem = call.problem;
  const int64_t element_bytes = ElementBytes(call.type), compute_bytes = ComputeBytes(element_bytes);
  const int64_t state_bytes = (call.is_backward ? 1 : 2) * compute_bytes;
  SoftmaxPlan plan{};
  plan.strategy = ChooseStrategy(problem, element_bytes, call.indices_are_sorted, call.deterministic);
  ScratchSizes sizes;
  if (plan.strategy == Strategy::kTiles || plan.strategy == Strategy::kSortThenTiles) {
    // Segments of a launch are numbered in 32 bits, and rows if they are sorted. A batch that is too large for that is
    // processed one by one.
    const bool sorts = plan.strategy == Strategy::kSortThenTiles;
    const bool fits = sorts ? OrderFits(problem) : SegmentsFit(problem.batch * problem.segments);
    Problem at_once = problem;
    at_once.batch = plan.elements_at_once = fits ? problem.batch : 1;
    plan.tiles = MakeSoftmaxTileGrid(at_once.batch * at_once.rows, problem.features, element_bytes, call.is_backward);
    if (sorts) sizes.Add(SegmentOrderScratchBytes(at_once, /*holds_order=*/true));
    sizes.Add(sizeof(LongRunCounters));
    sizes.Add(plan.tiles.tiles * sizeof(uint32_t));
    sizes.Add(plan.tiles.tiles * 2 * sizeof(int32_t));
    sizes.Add(plan.tiles.tiles * problem.features * state_bytes);
    sizes.Add(plan.tiles.tiles * problem.features * state_bytes);
    sizes.Add(at_once.batch * problem.segments * problem.features * state_bytes);
  } else if (plan.strategy == Strategy::kTable) {
    const int64_t table_bytes = TableBytes(problem, element_bytes);
    plan.table = MakeTableGrid(problem, element_bytes, DeviceAttributesForPlan().multiprocessors);
    if (!call.is_backward) {
      sizes.Add(sizeof(uint32_t));
      sizes.Add(table_bytes);
      sizes.Add(table_bytes);
    }
    sizes.Add(table_bytes);
  }
  plan.scratch_bytes = sizes.total;
  return plan;
}

template <typename T, bool kBackward>
struct Launcher {
  using C = ComputeType<T>;
  const SoftmaxCall& call;
  const SoftmaxPlan& plan;
  cudaStream_t stream;
  const Problem& problem = call.problem;
  const T* inputs[2] = {static_cast<const T*>(call.inputs[0]), static_cast<const T*>(call.inputs[1])};
  T* output = static_cast<T*>(call.output);

  CudaStatus Launch() const {
    switch (plan.strategy) {
      case Strategy::kFill:
        return JB_CUDA_STATUS(
            cudaMemsetAsync(output, 0, problem.batch * problem.rows * problem.features * sizeof(T), stream));
      case Strategy::kSmall:
        return SoftmaxTileVector(problem.features, sizeof(T)) > 1 ? Small<SoftmaxTileVector(0, sizeof(T))>()
                                                                  : Small<1>();
      case Strategy::kTable:
        return Table();
      default:
        return Tiles();
    }
  }

  // `batch` batch elements from `first` on, in memory order.
  OrderedRows RowsOf(int64_t first, int64_t batch) const {
    OrderedRows rows{};
    const int64_t first_id = problem.ids_are_shared ? 0 : first * problem.rows;
    const char* const segment_ids =
        static_cast<const char*>(call.segment_ids) + first_id * (call.ids_are_64_bit ? 8 : 4);
    rows.ids = {segment_ids, call.ids_are_64_bit, problem.segments};
    rows.count = batch * problem.rows;
    rows.batch_rows = problem.rows;
    rows.segments = batch * problem.segments;
    rows.ids_are_shared = problem.ids_are_shared;
    return rows;
  }

  template <int kVec>
  CudaStatus Small() const {
    SmallArguments<T> a{};
    a.rows = RowsOf(0, problem.batch);
    for (int i = 0; i < (kBackward ? 2 : 1); ++i) {
      a.inputs[i] = inputs[i];
      a.is_shared[i] = call.is_shared[i] && problem.batch > 1;
    }
    a.output = output;
    a.features = static_cast<int>(problem.features);
    const int64_t vectors = problem.features / kVec;
    // Wide rows are split into four columns of at least 64 bytes, so that several multiprocessors share a segment with
    // many rows.
    constexpr int kMinLanes = 64 / (kVec * static_cast<int>(sizeof(T)));
    a.lanes = 1;
    while (a.lanes < MaxSmallLanes(kVec) && a.lanes < vectors && (a.lanes < kMinLanes || 4 * a.lanes < vectors)) {
      a.lanes *= 2;
    }
    a.columns = static_cast<int>(CeilDivide(vectors, a.lanes));
    const int64_t wanted = SmallBlocks(a.rows.segments, a.columns);
    const int64_t max_segment_blocks = wanted > a.columns ? wanted / a.columns : 1;
    const int64_t block_segments = CeilDivide(a.rows.segments, max_segment_blocks);
    a.block_segments = static_cast<int>(block_segments < kMaxSmallSegments ? block_segments : kMaxSmallSegments);
    const int64_t blocks = CeilDivide(a.rows.segments, a.block_segments) * a.columns;
    SmallKernel<T, kVec, kBackward><<<GridSize(blocks), kSmallSoftmaxThreads, 0, stream>>>(a);
    return JB_LAUNCH_STATUS(SmallKernel);
  }

  CudaStatus Tiles() const {
    for (int64_t b = 0; b < problem.batch; b += plan.elements_at_once) {
      JB_RETURN_IF_CUDA_ERROR(TilesFrom(b));
    }
    return {};
  }

  // The batch elements of one launch, starting at `first`.
  CudaStatus TilesFrom(int64_t first) const {
    Problem at_once = problem;
    at_once.batch = plan.elements_at_once;
    const int64_t first_row = first * problem.rows;
    ScratchCarver carver(call.scratch);
    SoftmaxTileArguments<T, kBackward> a{};
    a.rows = RowsOf(first, at_once.batch);
    if (plan.strategy == Strategy::kSortThenTiles) {
      SegmentOrder order;
      char* const order_scratch = carver.Take<char>(SegmentOrderScratchBytes(at_once, /*holds_order=*/true));
      JB_RETURN_IF_CUDA_ERROR(
          LaunchSegmentOrder(at_once, a.rows.ids.ids, call.ids_are_64_bit, order_scratch, &order, stream));
      a.rows.sorted_segments = order.segments;
      a.rows.order = order.rows;
    }
    const SoftmaxTileGrid& grid = plan.tiles;
    a.is_flat = plan.strategy == Strategy::kTiles && grid.lanes.columns == 1;
    for (int i = 0; i < (kBackward ? 2 : 1); ++i) {
      a.is_shared[i] = call.is_shared[i] && at_once.batch > 1;
      a.inputs[i] = inputs[i] + (call.is_shared[i] ? 0 : first_row * problem.features);
      a.is_flat = a.is_flat && !a.is_shared[i];
    }
    a.output = output + first_row * problem.features;
    a.features = problem.features;
    a.lanes = grid.lanes;
    a.lanes_inverse = CeilDivide(65536, grid.lanes.lanes);
    a.own_rows = grid.own_rows;
    a.tile_rows = grid.tile_rows;
    a.tiles = grid.tiles;
    using Total = typename SoftmaxReduction<T, kBackward>::Total;
    a.counters = carver.Take<LongRunCounters>(1);
    a.carries.in_segment = carver.Take<uint32_t>(grid.tiles);
    a.left_rows = carver.Take<int32_t>(2 * grid.tiles);
    a.carries.in = carver.Take<Total>(grid.tiles * problem.features);
    a.carries.out = carver.Take<Total>(grid.tiles * problem.features);
    a.totals = carver.Take<Total>(a.rows.segments * problem.features);
    constexpr int kWidest = SoftmaxTileVector(0, sizeof(T));
    return grid.vector > 1 ? LaunchTiles<kWidest>(a) : LaunchTiles<1>(a);
  }

  template <int kVec>
  CudaStatus LaunchTiles(SoftmaxTileArguments<T, kBackward> a) const {
    constexpr int kElementBytes = static_cast<int>(sizeof(C) + (kBackward ? 2 : 1) * sizeof(T));
    const int shared_bytes = a.tile_rows * a.lanes.lanes * kVec * kElementBytes;
    const auto kernel = SoftmaxTileKernel<T, kVec, kBackward>;
    JB_RETURN_IF_CUDA_ERROR(AllowSharedMemory(kernel));
    kernel<<<GridSize(a.tiles * a.lanes.columns), kSoftmaxTileThreads, shared_bytes, stream>>>(a);
    JB_RETURN_IF_LAUNCH_ERROR(SoftmaxTileKernel);
    if (a.tiles == 1) return {};  // no run is long
    a.lanes = AssignFeatures(a.features / kVec, kMaxLongRunLanes);
    LongRunArguments<T, kBackward> runs{};
    runs.tiles = a;
    runs.merge.problem.features = a.features;
    runs.merge.outputs = {a.totals};
    runs.merge.carries = a.carries;
    runs.merge.merge_counters = a.counters->of_merge;
    runs.merge.features = a.lanes;
    runs.merge.blocks_per_batch = runs.merge.row_blocks = a.tiles;
    runs.merge.merge_parts = 1;
    runs.merge_blocks = GridSize(CeilDivide(a.tiles, kMergeSlots) * a.lanes.columns);
    const int64_t tiles_per_block = CeilDivide(a.tiles, kBlocksOfFewTiles);
    runs.tiles_per_block = static_cast<int>(tiles_per_block < kMaxTilesPerBlock ? tiles_per_block : kMaxTilesPerBlock);
    const int64_t blocks = runs.merge_blocks + CeilDivide(a.tiles, runs.tiles_per_block) * a.lanes.columns;
    LongRunsKernel<T, kVec, kBackward><<<GridSize(blocks), kLongRunThreads, 0, stream>>>(runs);
    return JB_LAUNCH_STATUS(LongRunsKernel);
  }

  CudaStatus Table() const {
    const int64_t cells = problem.batch * problem.segments * problem.features;
    ScratchCarver carver(call.scratch);
    SoftmaxTableArguments<T> a{};
    a.ids = {call.segment_ids, call.ids_are_64_bit, problem.segments};
    a.problem = problem;
    for (int i = 0; i < (kBackward ? 2 : 1); ++i) {
      a.inputs[i] = inputs[i];
      a.is_shared[i] = call.is_shared[i];
    }
    a.output = output;
    // The sums come last and the flag before them, so that one memset clears both.
    if (!kBackward) {
      a.maxima = carver.Take<TableKey<C>>(cells);
      a.sums_from_maximum = carver.Take<C>(cells);
      a.needs_max_pass = carver.Take<uint32_t>(1);
    }
    a.sums = carver.Take<C>(cells);
    char* const cleared = kBackward ? reinterpret_cast<char*>(a.sums) : reinterpret_cast<char*>(a.needs_max_pass);
    const int64_t cleared_bytes = reinterpret_cast<char*>(a.sums + cells) - cleared;
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(cleared, 0, cleared_bytes, stream));
    constexpr int kWidest = 16 / sizeof(C);
    return plan.table.vector == kWidest ? LaunchTable<kWidest>(a) : LaunchTable<1>(a);
  }

  template <int kVec, bool kIsReadAgain>
  CudaStatus LaunchSumRows(SoftmaxTableArguments<T> a, uint32_t blocks) const {
    const CacheGrid& cache = plan.table.cache;
    if (cache.slots == 0) {
      SumRowsKernel<T, kVec, kBackward, kIsReadAgain><<<blocks, kSoftmaxTableThreads, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(SumRowsKernel);
    }
    constexpr int kSlotBytes = static_cast<int>(sizeof(Vector<C, kVec>) + sizeof(uint32_t));
    const auto kernel = SumRowsCachedKernel<T, kVec, kBackward, kIsReadAgain>;
    int max_shared_bytes = 0;
    JB_RETURN_IF_CUDA_ERROR(AllowSharedMemory(kernel, &max_shared_bytes));
    for (a.cache_slots = cache.slots; a.cache_slots * kSlotBytes > max_shared_bytes;) a.cache_slots /= 2;
    const int shared_bytes = a.cache_slots * kSlotBytes;
    a.blocks_per_batch = cache.blocks_per_batch;
    const int64_t grid = problem.batch * cache.blocks_per_batch;
    kernel<<<GridSize(grid), kSoftmaxCacheThreads, shared_bytes, stream>>>(a);
    return JB_LAUNCH_STATUS(SumRowsCachedKernel);
  }

  template <int kVec>
  CudaStatus LaunchTable(SoftmaxTableArguments<T> a) const {
    const int64_t vectors = problem.rows * (problem.features / kVec);
    a.row_vectors = static_cast<uint32_t>(problem.features / kVec);
    const auto blocks_for = [&](int rows_in_flight) {
      const int64_t blocks = CeilDivide(vectors, int64_t{kSoftmaxTableThreads} * rows_in_flight);
      const int64_t row_blocks = CeilDivide(a.row_vectors, kSoftmaxTableThreads);
      a.blocks_per_batch = blocks > row_blocks ? blocks : row_blocks;
      return GridSize(problem.batch * a.blocks_per_batch);
    };
    uint32_t blocks = blocks_for(kSoftmaxRowsInFlight);
    const bool is_kept = problem.batch * vectors * kVec * static_cast<int64_t>(sizeof(T)) <= Tuning::kKeptBytes;
    const int64_t part_segments = CeilDivide(problem.segments, plan.table.parts);
    a.part_segments = static_cast<uint32_t>(part_segments);
    for (int64_t first = 0; first < problem.segments; first += part_segments) {
      a.first_segment = static_cast<uint32_t>(first);
      JB_RETURN_IF_CUDA_ERROR(is_kept ? LaunchSumRows<kVec, true>(a, blocks) : LaunchSumRows<kVec, false>(a, blocks));
    }
    blocks = blocks_for(/*rows_in_flight=*/1);
    if constexpr (kBackward) {
      GradientKernel<T, kVec><<<blocks, kSoftmaxTableThreads, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(GradientKernel);
    } else {
      DivideKernel<T, kVec><<<blocks, kSoftmaxTableThreads, 0, stream>>>(a);
      JB_RETURN_IF_LAUNCH_ERROR(DivideKernel);
      int multiprocessors = 0;
      JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
      // As many as are resident at once: usually they have nothing to do.
      const int64_t max_blocks = CeilDivide(4 * multiprocessors, problem.batch);
      blocks = blocks_for(kSoftmaxRowsInFlight);
      if (a.blocks_per_batch > max_blocks) {
        const int64_t row_blocks = CeilDivide(a.row_vectors, kSoftmaxTableThreads);
        a.blocks_per_batch = max_blocks > row_blocks ? max_blocks : row_blocks;
        blocks = GridSize(problem.batch * a.blocks_per_batch);
      }
      MaxPassKernel<T, kVec, false><<<blocks, kSoftmaxTableThreads, 0, stream>>>(a);
      JB_RETURN_IF_LAUNCH_ERROR(MaxPassKernel);
      MaxPassKernel<T, kVec, true><<<blocks, kSoftmaxTableThreads, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(MaxPassKernel);
    }
  }
};

}  // namespace

Plan SoftmaxCall::CudaPlan() const { return PlanOf(*this).Summary(); }

CudaStatus SoftmaxCall::LaunchOnCuda(cudaStream_t stream) const {
  const SoftmaxPlan plan = PlanOf(*this);
  if (plan.strategy == Strategy::kNothing) return {};
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  if (!SegmentsFit(problem.segments) || scratch_bytes < plan.scratch_bytes) return status;
  DispatchFloating(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    status = is_backward ? Launcher<T, true>{*this, plan, stream}.Launch()
                         : Launcher<T, false>{*this, plan, stream}.Launch();
  });
  return status;
}

}  // namespace jax_baracuda::segment
