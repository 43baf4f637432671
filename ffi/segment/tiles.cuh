// Reduction of rows that come in the order of their segments, either as they lie or through a permutation.
//
// Rows are cut into tiles of 32, whatever the segments, so a hot segment costs no more than any other rows. A tile is
// reduced by a group of threads, one vector of features each, that walks down the rows with the cells in registers. The
// word of a tile's "starts" holds a bit for each row that begins a run of rows of one segment, and decides alone who
// reduces which rows:
//
//   * the tile in which a run starts owns it, and reads on into the next tile to the run's end;
//   * a run that covers the whole next tile (whose starts are 0) is long: its owner stops at its own tile's end, and
//     every later tile reduces its part, its piece. Pieces of one block are merged in shared memory; what remains is, for
//     each block, at most one piece at its head, of a run that enters the block, and one at its tail, of a run that starts
//     in the block and leaves it. MergePieces folds those.
//
// No two threads write one cell, and partial results are merged in an order that shapes and ids alone decide, so there are
// no atomics and the result is bit-equal from run to run. Ids that are not sorted after all give wrong results but no
// access out of bounds, because the starts alone steer every loop.
#pragma once

#include <cuda_pipeline.h>

#include "ffi/segment/device.cuh"
#include "ffi/segment/reduction.cuh"

namespace jax_baracuda::segment {

inline constexpr int kTileRows = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// How a thread gets at the rows of its tile.
enum class RowSource {
  kDirect,   // as they lie
  kOrdered,  // through the order that brings them together by segment
  kStaged,   // as they lie, through shared memory: rows too narrow for whole-vector loads
};

// Small blocks: one that waits for its ids leaves most of a multiprocessor at work.
inline constexpr int kTileThreads = 64;

template <typename Reduction>
struct TileArguments {
  const typename Reduction::Element* data;
  SegmentIds ids;                  // of the rows as they lie; not used with `sorted_segments`
  const uint32_t* sorted_segments;  // nullptr, or the segments in order, with `order` the rows they come from
  const uint32_t* order;
  Problem problem;     // with an order: the batch joined into one element, whose rows and segments are numbered through
  int64_t batch_rows;  // rows of one element of the batch; less than problem.rows only where the batch was joined
  typename Reduction::Outputs outputs;
  uint8_t* present;  // [batch, segments], set to 1 for each segment that has a row
  Pieces pieces;
  FeatureLanes features;
  int groups;               // tiles of a block
  int64_t blocks_per_batch;  // blocks along the rows of one element of the batch
};

// Rows of a tile in an array in shared memory, padded so that groups which read the same row of their tiles read from
// different banks.
inline constexpr int kPaddedTileRows = kTileRows + 1;

// Bytes of a tile of narrow rows in shared memory; padded, again for the banks.
template <typename T>
__host__ __device__ __forceinline__ int StagedTileBytes(int features) {
  return kTileRows * features * static_cast<int>(sizeof(T)) + (sizeof(T) < 4 ? 4 : static_cast<int>(sizeof(T)));
}

template <typename Reduction, int kVec, RowSource kSource>
struct TileShared {
  using T = typename Reduction::Element;
  using Cells = typename Reduction::template Accumulator<kVec>;

  Cells* slots;        // the pieces at the heads of the groups' tiles, one for each thread
  uint32_t* starts;    // [groups + 2], from the tile before the block's first to the one after its last
  uint32_t* segments;  // [groups * kPaddedTileRows]
  uint32_t* order;     // [(groups + 1) * kPaddedTileRows], with an order only
  char* rows;          // [groups + 1] tiles, staged only

  static constexpr int kSlotBytes = (kTileThreads * static_cast<int>(sizeof(Cells)) + 15) / 16 * 16;
  static constexpr bool kWithOrder = kSource == RowSource::kOrdered;

  static int Bytes(int groups, int64_t features) {
    const int words = groups + 2 + groups * kPaddedTileRows + (kWithOrder ? (groups + 1) * kPaddedTileRows : 0);
    const int rows =
        kSource == RowSource::kStaged ? (groups + 1) * StagedTileBytes<T>(static_cast<int>(features)) + 8 : 0;
    return kSlotBytes + words * 4 + rows;
  }

  __device__ TileShared(uint4* shared, int groups) : slots(reinterpret_cast<Cells*>(shared)) {
    starts = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared) + kSlotBytes);
    segments = starts + groups + 2;
    order = segments + groups * kPaddedTileRows;
    uint32_t* end = order + (kWithOrder ? (groups + 1) * kPaddedTileRows : 0);
    rows = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(end) + 7) / 8 * 8);
  }
};

// Copies the tiles of a block, and the one after, into padded shared memory; the caller waits for the copy.
template <typename T>
__device__ void StageRows(const T* first_row, int64_t rows_left, int tiles, int features, char* staged) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int tile_bytes = kTileRows * features * static_cast<int>(sizeof(T));
  const int64_t bytes_left = rows_left * features * static_cast<int64_t>(sizeof(T));
  const bool words_are_aligned = reinterpret_cast<uintptr_t>(first_row) % 4 == 0;
  for (int tile = warp; tile < tiles; tile += warps) {
    const char* source = reinterpret_cast<const char*>(first_row) + static_cast<int64_t>(tile) * tile_bytes;
    char* target = staged + tile * StagedTileBytes<T>(features);
    const int64_t left = bytes_left - static_cast<int64_t>(tile) * tile_bytes;
    const int bytes = left < tile_bytes ? (left < 0 ? 0 : static_cast<int>(left)) : tile_bytes;
    const int word_bytes = words_are_aligned ? bytes / 4 * 4 : 0;
    for (int i = 4 * lane; i < word_bytes; i += 4 * 32) __pipeline_memcpy_async(target + i, source + i, 4);
    for (int i = word_bytes + lane * sizeof(T); i < bytes; i += 32 * sizeof(T)) {
      *reinterpret_cast<T*>(target + i) = *reinterpret_cast<const T*>(source + i);
    }
  }
  __pipeline_commit();
}

// The starts of the tiles of a block, the one before and the one after, and the rows' segments, into shared memory.
template <typename Shared, typename SegmentOf>
__device__ __forceinline__ void FindStarts(const Shared& shared, int tiles, int64_t first_row, int64_t rows,
                                           const uint32_t* order, SegmentOf&& segment_of) {
  constexpr int kTilesInFlight = 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  // Each warp takes neighbouring tiles, so that a row's predecessor is at hand.
  const int share = (tiles + 2 + warps - 1) / warps;
  const int begin = warp * share - 1, end = min(begin + share, tiles + 1);
  const int64_t row_before = first_row + static_cast<int64_t>(begin) * kTileRows - 1;
  uint32_t before = begin < end && row_before >= 0 && row_before < rows ? segment_of(row_before) : kDropped;
  for (int tile = begin; tile < end; tile += kTilesInFlight) {
    uint32_t segment[kTilesInFlight], ordered_row[kTilesInFlight];
#pragma unroll
    for (int u = 0; u < kTilesInFlight; ++u) {
      const int64_t row = first_row + static_cast<int64_t>(tile + u) * kTileRows + lane;
      const bool exists = tile + u < end && row >= 0 && row < rows;
      segment[u] = exists ? segment_of(row) : kDropped;
      if (Shared::kWithOrder) ordered_row[u] = exists ? __ldg(order + row) : 0;
    }
#pragma unroll
    for (int u = 0; u < kTilesInFlight; ++u) {
      if (tile + u >= end) break;
      const int64_t row = first_row + static_cast<int64_t>(tile + u) * kTileRows + lane;
      uint32_t previous = __shfl_up_sync(kAllLanes, segment[u], 1);
      if (lane == 0) previous = before;
      before = __shfl_sync(kAllLanes, segment[u], 31);
      // The row past the last one counts as a start, so that the last run ends there.
      const uint32_t starts = __ballot_sync(kAllLanes, row <= 0 || row >= rows || segment[u] != previous);
      if (lane == 0) shared.starts[tile + u + 1] = starts;
      const int padded = (tile + u) * kPaddedTileRows + lane;
      if (tile + u >= 0 && tile + u < tiles) shared.segments[padded] = segment[u];
      if (Shared::kWithOrder && tile + u >= 0) shared.order[padded] = ordered_row[u];
    }
  }
}

template <typename Reduction, int kVec, RowSource kSource>
__global__ void __launch_bounds__(kTileThreads, Reduction::kTileBlocks) TileKernel(
    const __grid_constant__ TileArguments<Reduction> a) {
  using T = typename Reduction::Element;
  using Cells = typename Reduction::template Accumulator<kVec>;
  constexpr int kInFlight = Reduction::kRowsInFlight;
  extern __shared__ uint4 shared_memory[];
  const TileShared<Reduction, kVec, kSource> shared(shared_memory, a.groups);

  const int64_t row_block = blockIdx.x / a.features.columns;
  const int column_block = blockIdx.x % a.features.columns;
  const int64_t b = row_block / a.blocks_per_batch;
  const int64_t first_row = (row_block - b * a.blocks_per_batch) * a.groups * kTileRows;
  const int64_t rows = a.problem.rows, features = a.problem.features;
  const T* data = a.data + (a.problem.data_is_shared ? 0 : b * rows * features);

  if constexpr (kSource == RowSource::kStaged) {
    StageRows(data + first_row * features, rows - first_row, a.groups + 1, static_cast<int>(features), shared.rows);
  }
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * rows;
  FindStarts(shared, a.groups, first_row, rows, a.order, [&](int64_t row) {
    if constexpr (kSource == RowSource::kOrdered) {
      const uint32_t segment = __ldg(a.sorted_segments + row);
      return segment < a.problem.segments ? segment : kDropped;
    } else {
      return a.ids[ids_offset + row];
    }
  });
  if constexpr (kSource == RowSource::kStaged) __pipeline_wait_prior(0);
  __syncthreads();

  const int group = threadIdx.x / a.features.lanes;
  const int64_t column =
      (static_cast<int64_t>(column_block) * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const int64_t tile_row = first_row + group * kTileRows;
  const bool is_active = group < a.groups && column < features && tile_row < rows;

  Cells cells;
  const int64_t first_segment = b * a.problem.segments;
  uint32_t head_segment = kDropped;
  int64_t run_segment = -1;  // of the run under reduction; below 0 its rows are dropped
  bool has_piece = false, goes_on = false;  // a piece at the tile's head; a piece that goes on in the next group's tile
  bool owns_long_run = false;

  if (is_active) {
    const uint32_t before = shared.starts[group], starts = shared.starts[group + 1], after = shared.starts[group + 2];
    const uint32_t* segments = shared.segments + group * kPaddedTileRows;
    head_segment = segments[0];
    const bool enters = (starts & 1) == 0;
    has_piece = enters && (starts == 0 || before == 0) && head_segment != kDropped;
    goes_on = has_piece && starts == 0 && (after & 1) == 0 && group + 1 < a.groups;

    // Rows [begin, end) of the tile are this group's; a run that enters without being long belongs to the tile before.
    const int begin = enters && !has_piece ? (starts == 0 ? kTileRows : __ffs(starts) - 1) : 0;
    int end = rows - tile_row < kTileRows ? static_cast<int>(rows - tile_row) : kTileRows;
    if (starts != 0 && end == kTileRows && after != 0) end += __ffs(after) - 1;

    bool is_piece = has_piece;
    const auto store_run = [&] {
      if (is_piece) {
        shared.slots[threadIdx.x] = cells;
      } else if (run_segment >= 0) {
        cells.Store(a.outputs, run_segment, features, column);
      }
    };
    cells.Start();
    uint32_t coming_starts = begin < kTileRows ? starts >> begin : 0;
    const T* next_row = data + (tile_row + begin) * features + column;

    for (int i = begin; i < end; i += kInFlight) {
      Packed<T, kVec> values[kInFlight];
      int32_t row[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int tile_offset = i + u;
        row[u] = static_cast<int32_t>(tile_row) + tile_offset;
        if (tile_offset >= end) continue;
        if constexpr (kSource == RowSource::kStaged) {
          const char* tile =
              shared.rows + (group + tile_offset / kTileRows) * StagedTileBytes<T>(static_cast<int>(features));
          const int element = tile_offset % kTileRows * static_cast<int>(features) + static_cast<int>(column);
          memcpy(&values[u], tile + element * sizeof(T), sizeof(values[u]));
        } else if constexpr (kSource == RowSource::kOrdered) {
          const uint32_t joined_row =
              shared.order[group * kPaddedTileRows + tile_offset + tile_offset / kTileRows];
          row[u] = a.batch_rows == rows ? joined_row : joined_row % static_cast<uint32_t>(a.batch_rows);
          const uint32_t data_row = a.problem.data_is_shared ? static_cast<uint32_t>(row[u]) : joined_row;
          values[u] = LoadPackedStreaming<T, kVec>(data + data_row * features + column);
        } else {
          values[u] = LoadPackedStreaming<T, kVec>(next_row);
          next_row += features;
        }
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (i + u >= end) break;
        if ((coming_starts >> u) & 1) {
          store_run();
          is_piece = false;
          const uint32_t segment = segments[i + u];
          run_segment = segment == kDropped ? -1 : first_segment + segment;
          if (segment != kDropped && column == 0) a.present[run_segment] = 1;
          cells.Start();
        }
        cells.Add(Unpack<T, kVec>(values[u]), row[u], a.outputs);
      }
      coming_starts >>= kInFlight;
    }
    // Starts that are 0 are those of a whole tile: what lies past the last row counts as a start.
    owns_long_run = starts != 0 && after == 0 && run_segment >= 0;
    if (!owns_long_run) store_run();
  }

  // Merge the pieces of each long run within the block: after a step, the piece of a group whose run still `goes_on`
  // covers `2 * step` groups.
  __shared__ bool shared_goes_on[kTileThreads];
  if (group < a.groups) shared_goes_on[group] = goes_on;
  if (__syncthreads_or(goes_on)) {
    for (int step = 1; step < a.groups; step *= 2) {
      Cells piece;
      bool next_goes_on = false;
      if (goes_on) {
        piece = shared.slots[threadIdx.x];
        piece.Merge(shared.slots[threadIdx.x + step * a.features.lanes], a.outputs);
        next_goes_on = group + 2 * step < a.groups && shared_goes_on[group + step];
      }
      const bool is_last = !__syncthreads_or(next_goes_on);
      if (goes_on) {
        shared.slots[threadIdx.x] = piece;
        shared_goes_on[group] = next_goes_on;
      }
      goes_on = next_goes_on;
      __syncthreads();
      if (is_last) break;
    }
  }

  const int64_t vector = row_block * (features / kVec) + column / kVec;
  if (owns_long_run) {
    // The pieces of the groups after this one are in the next group's slot.
    if (group + 1 < a.groups) cells.Merge(shared.slots[threadIdx.x + a.features.lanes], a.outputs);
    int next = group + 1;
    while (next < a.groups && shared.starts[next + 1] == 0) ++next;
    const uint32_t last = shared.starts[a.groups], after = shared.starts[a.groups + 1];
    const bool leaves_block = next == a.groups && (after & 1) == 0 && (after == 0 || last == 0);
    if (leaves_block) {
      static_cast<Cells*>(a.pieces.tail)[vector] = cells;
    } else {
      cells.Store(a.outputs, run_segment, features, column);
    }
  }
  if (threadIdx.x == 0 && column_block == 0) a.pieces.head_segment[row_block] = has_piece ? head_segment : kDropped;
  if (group == 0 && has_piece) static_cast<Cells*>(a.pieces.head)[vector] = shared.slots[threadIdx.x];
}

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeWindow = kMergeThreads;  // slots of pieces that a block looks at
inline constexpr int kShortRun = 32;

// Folds the pieces that the blocks of rows left into the output, one slot a block. It takes two levels, so that a hot
// segment keeps many blocks busy: the first reduces within windows of slots, and leaves what it makes of a run that enters
// a window in the head of the window's first slot, and of a run that leaves it in the tail of the window's last; the second
// folds those.
//
// A block takes the runs of pieces that begin in its window: a group of threads a short run, the whole block a long
// one.
template <typename Reduction, int kVec, int kLevel>
__device__ __forceinline__ void MergePieces(const TileArguments<Reduction>& a, int64_t slots, int64_t block) {
  using Cells = typename Reduction::template Accumulator<kVec>;
  __shared__ int run_starts[kMergeWindow], long_runs[kMergeWindow];
  __shared__ int runs, long_run_count, in_run;
  __shared__ Cells shared_cells[kMergeThreads];

  constexpr int kSlotStep = kLevel == 1 ? 1 : kMergeWindow;
  const int64_t count = CeilDivide(slots, kSlotStep);
  const int64_t window = block / a.features.columns * kMergeWindow;
  const int64_t limit = kLevel == 1 ? min(count, window + kMergeWindow) : count;
  const int groups = kMergeThreads / a.features.lanes;
  const int group = threadIdx.x / a.features.lanes;
  const int64_t column =
      (block % a.features.columns * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const bool is_active = group < groups && column < a.problem.features;
  const uint32_t* const segments = a.pieces.head_segment;
  Cells* const heads = static_cast<Cells*>(a.pieces.head) + column / kVec;
  Cells* const tails = static_cast<Cells*>(a.pieces.tail) + column / kVec;
  const int64_t row_vectors = a.problem.features / kVec;

  const auto enters_window = [&](int64_t slot) { return slot > 0 && segments[slot - 1] == segments[slot]; };
  // What pieces of one run have in common. The element of the batch is part of it at the second level, which sees the
  // first slots of windows only and not the empty slot with which an element begins.
  constexpr int64_t kNoRun = -1;
  const auto run_at = [&](int64_t i) {
    const int64_t slot = i * kSlotStep;
    const uint32_t segment = segments[slot];
    if (segment == kDropped || (kLevel == 2 && !enters_window(slot))) return kNoRun;
    return kLevel == 1 ? int64_t{segment} : slot / a.blocks_per_batch * int64_t{kDropped} + segment;
  };

  if (threadIdx.x == 0) runs = long_run_count = 0;
  __syncthreads();
  const int64_t own = window + threadIdx.x;
  if (own < limit) {
    const int64_t run = run_at(own);
    const bool begins = own == 0 || (kLevel == 1 && threadIdx.x == 0) || run_at(own - 1) != run;
    if (run != kNoRun && begins) run_starts[atomicAdd(&runs, 1)] = threadIdx.x;
  }
  __syncthreads();

  // Pieces first, first + step, ... below `end`.
  const auto reduce = [&](int64_t first, int64_t end, int step) {
    constexpr int kInFlight = 4;
    Cells cells = heads[first * kSlotStep * row_vectors];
    for (int64_t i = first + step; i < end; i += kInFlight * step) {
      Cells others[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (i + u * step < end) others[u] = heads[(i + u * step) * kSlotStep * row_vectors];
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (i + u * step < end) cells.Merge(others[u], a.outputs);
      }
    }
    return cells;
  };
  // The run of the pieces [begin, end).
  const auto finish_run = [&](const Cells& pieces, int64_t begin, int64_t end) {
    const int64_t slot = begin * kSlotStep;
    if (kLevel == 1 && begin == window && enters_window(slot)) {
      heads[slot * row_vectors] = pieces;
      return;
    }
    // A run that enters a block started in the block before, or in one from which level 1 brought it there.
    Cells cells = tails[(slot - 1) * row_vectors];
    cells.Merge(pieces, a.outputs);
    if (kLevel == 1 && end == limit && end < slots && segments[end] == segments[slot]) {
      tails[(end - 1) * row_vectors] = cells;
      return;
    }
    const int64_t b = slot / a.blocks_per_batch;
    cells.Store(a.outputs, b * a.problem.segments + segments[slot], a.problem.features, column);
  };

  for (int run = group; group < groups && run < runs; run += groups) {
    const int64_t begin = window + run_starts[run];
    const int64_t id = run_at(begin);
    int64_t end = begin + 1;
    while (end < limit && end <= begin + kShortRun && run_at(end) == id) ++end;
    if (end <= begin + kShortRun) {
      if (is_active) finish_run(reduce(begin, end, 1), begin, end);
    } else if (threadIdx.x % a.features.lanes == 0) {
      long_runs[atomicAdd(&long_run_count, 1)] = run_starts[run];
    }
  }
  __syncthreads();

  for (int run = 0; run < long_run_count; ++run) {
    const int64_t begin = window + long_runs[run];
    const int64_t id = run_at(begin);
    int64_t end = begin;
    for (int belonging = kMergeThreads; belonging == kMergeThreads; end += belonging) {
      if (threadIdx.x == 0) in_run = kMergeThreads;
      __syncthreads();
      const int64_t i = end + threadIdx.x;
      if (i >= limit || run_at(i) != id) atomicMin(&in_run, static_cast<int>(threadIdx.x));
      __syncthreads();
      belonging = in_run;
      __syncthreads();
    }
    const bool takes_part = is_active && begin + group < end;
    if (takes_part) shared_cells[threadIdx.x] = reduce(begin + group, end, groups);
    for (int left = groups; left > 1; left = (left + 1) / 2) {
      const int half = (left + 1) / 2;
      __syncthreads();
      if (takes_part && group + half < left && begin + group + half < end) {
        Cells cells = shared_cells[threadIdx.x];
        cells.Merge(shared_cells[threadIdx.x + half * a.features.lanes], a.outputs);
        shared_cells[threadIdx.x] = cells;
      }
    }
    if (takes_part && group == 0) finish_run(shared_cells[threadIdx.x], begin, end);
    __syncthreads();
  }
}

inline constexpr int kFillSegments = 4 * kMergeThreads;  // of a block

// The reduction of nothing for the segments that have no row; for all of them where `present` is nullptr.
template <typename Reduction, int kVec>
__device__ __forceinline__ void FillAbsent(const TileArguments<Reduction>& a, int64_t block) {
  __shared__ uint32_t shared_present[kMergeThreads];
  const int64_t segments = a.problem.batch * a.problem.segments;
  const int64_t first_segment = block / a.features.columns * kFillSegments;
  const int count = static_cast<int>(min(segments - first_segment, static_cast<int64_t>(kFillSegments)));
  uint32_t four = 0;
  // The last word may reach past the segments, but not past the scratch, which is rounded up.
  if (a.present != nullptr && 4 * static_cast<int>(threadIdx.x) < count) {
    four = __ldg(reinterpret_cast<const uint32_t*>(a.present + first_segment) + threadIdx.x);
  }
  shared_present[threadIdx.x] = four;
  const int own = min(max(count - 4 * static_cast<int>(threadIdx.x), 0), 4);
  const uint32_t own_bytes = own == 4 ? 0x01010101u : 0x01010101u & ((1u << (8 * own)) - 1);
  if (!__syncthreads_or((four & own_bytes) != own_bytes)) return;

  const int groups = kMergeThreads / a.features.lanes;
  const int group = threadIdx.x / a.features.lanes;
  const int64_t column =
      (block % a.features.columns * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  if (group >= groups || column >= a.problem.features) return;
  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
  for (int i = group; i < count; i += groups) {
    if (reinterpret_cast<const uint8_t*>(shared_present)[i] != 0) continue;
    nothing.Store(a.outputs, first_segment + i, a.problem.features, column);
  }
}

template <typename Reduction, int kVec>
__global__ void __launch_bounds__(kMergeThreads)
    MergeWindowsKernel(const __grid_constant__ TileArguments<Reduction> a, int64_t slots) {
  MergePieces<Reduction, kVec, 1>(a, slots, blockIdx.x);
}

// The last pass over the output: what is left of the pieces, and the segments without rows.
template <typename Reduction, int kVec>
__global__ void __launch_bounds__(kMergeThreads)
    FinishKernel(const __grid_constant__ TileArguments<Reduction> a, int64_t slots, int64_t merge_blocks) {
  if (blockIdx.x < merge_blocks) {
    MergePieces<Reduction, kVec, 2>(a, slots, blockIdx.x);
  } else {
    FillAbsent<Reduction, kVec>(a, blockIdx.x - merge_blocks);
  }
}

}  // namespace jax_baracuda::segment
