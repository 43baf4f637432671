// Segment maximum of rows that come in the order of their segments, either as they lie or through a permutation.
//
// Rows are cut into tiles of 32, whatever the segments, so a hot segment costs no more than any other rows. A tile is
// reduced by a group of threads, one vector of features each, that walks down the rows with the maximum in registers.
// The word of a tile's "starts" holds a bit for each row that begins a run of rows of one segment, and decides alone
// who reduces which rows:
//
//   * the tile in which a run starts owns it, and reads on into the next tile to the run's end;
//   * a run that covers the whole next tile (whose starts are 0) is long: its owner stops at its own tile's end, and
//     every later tile reduces its part, its piece. Pieces of one block are merged in shared memory; what remains is at
//     most one piece a block, which MergePieces folds into the output.
//
// No two threads write one cell, so there are no atomics. Ids that are not sorted after all give wrong results but no
// access out of bounds, because the starts alone steer every loop.
#pragma once

#include <cuda_pipeline.h>

#include "ffi/segment/segment_max_device.cuh"

namespace jax_baracuda::segment {

inline constexpr int kTileRows = 32;
// Rows that a thread loads before it uses the first; fewer where winners need the registers.
template <typename T, bool kWithWinner>
inline constexpr int kRowsInFlight = kWithWinner || sizeof(T) == 8 ? 4 : 8;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// How a thread gets at the rows of its tile.
enum class RowSource {
  kDirect,   // as they lie
  kOrdered,  // through the order that brings them together by segment
  kStaged,   // as they lie, through shared memory: rows too narrow for whole-vector loads
};

// Small blocks: one that waits for its ids leaves most of a multiprocessor at work.
inline constexpr int kTileThreads = 64;

// Blocks that share a multiprocessor, which caps the registers of a thread: 64 without winners, else 80 or 102.
template <typename T, bool kWithWinner>
inline constexpr int kTileBlocks = kWithWinner ? (sizeof(T) < 4 ? 12 : 10) : 16;

// A piece of a long run that enters a block of tiles from the block before: one slot per block.
template <typename T>
struct Pieces {
  uint32_t* segment;  // kDropped where the block has none
  T* best;            // [blocks, features]
  int32_t* winner;    // [blocks, features]
};

template <typename T>
struct TileArguments {
  const T* data;
  SegmentIds ids;                  // of the rows as they lie; not used with `sorted_segments`
  const uint32_t* sorted_segments;  // nullptr, or the segments in order, with `order` the rows they come from
  const uint32_t* order;
  Problem problem;     // with an order: the batch joined into one element, whose rows and segments are numbered through
  int64_t batch_rows;  // rows of one element of the batch; less than problem.rows only where the batch was joined
  bool first_wins;
  T* output;
  int32_t* winner;
  uint8_t* present;  // [batch, segments], set to 1 for each segment that has a row
  Pieces<T> pieces;
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

template <typename T, int kVec, bool kWithWinner, RowSource kSource>
struct TileShared {
  uint4* slots;        // the pieces of the groups: values, then winners
  uint32_t* starts;    // [groups + 2], from the tile before the block's first to the one after its last
  uint32_t* segments;  // [groups * kPaddedTileRows]
  uint32_t* order;     // [(groups + 1) * kPaddedTileRows], with an order only
  char* rows;          // [groups + 1] tiles, staged only

  static constexpr int kSlotBytes = kVec * (sizeof(T) + (kWithWinner ? sizeof(int32_t) : 0));

  static constexpr bool kWithOrder = kSource == RowSource::kOrdered;

  static int Bytes(int groups, int64_t features) {
    const int words = groups + 2 + groups * kPaddedTileRows + (kWithOrder ? (groups + 1) * kPaddedTileRows : 0);
    const int rows =
        kSource == RowSource::kStaged ? (groups + 1) * StagedTileBytes<T>(static_cast<int>(features)) + 8 : 0;
    return (kTileThreads * kSlotBytes + 15) / 16 * 16 + words * 4 + rows;
  }

  __device__ TileShared(uint4* shared, int groups) : slots(shared) {
    starts = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared) + (blockDim.x * kSlotBytes + 15) / 16 * 16);
    segments = starts + groups + 2;
    order = segments + groups * kPaddedTileRows;
    uint32_t* end = order + (kWithOrder ? (groups + 1) * kPaddedTileRows : 0);
    rows = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(end) + 7) / 8 * 8);
  }

  __device__ T* SlotBest(int thread) const { return reinterpret_cast<T*>(slots) + thread * kVec; }
  __device__ int32_t* SlotWinner(int thread) const {
    return reinterpret_cast<int32_t*>(reinterpret_cast<T*>(slots) + blockDim.x * kVec) + thread * kVec;
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

template <typename T, int kVec, bool kWithWinner, RowSource kSource>
__global__ void __launch_bounds__(kTileThreads, (kTileBlocks<T, kWithWinner>)) TileKernel(
    const __grid_constant__ TileArguments<T> a) {
  constexpr int kInFlight = kRowsInFlight<T, kWithWinner>;
  extern __shared__ uint4 shared_memory[];
  const TileShared<T, kVec, kWithWinner, kSource> shared(shared_memory, a.groups);

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

  Accumulator<T, kVec, kWithWinner> accumulator;
  const int64_t first_segment = b * a.problem.segments;
  uint32_t head_segment = kDropped;
  bool has_piece = false, goes_on = false;  // a piece at the tile's head; a piece that goes on in the next group's tile

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

    // The run under reduction is the tile's piece, or goes to `cell` when it ends; below 0 its rows are dropped.
    bool is_piece = has_piece;
    int64_t cell = -1;
    const auto store_run = [&] {
      if (is_piece) {
        accumulator.Store(shared.SlotBest(threadIdx.x), shared.SlotWinner(threadIdx.x));
      } else if (cell >= 0) {
        accumulator.Store(a.output + cell, a.winner + cell);
      }
    };
    accumulator.Start();
    uint32_t coming_starts = begin < kTileRows ? starts >> begin : 0;
    const T* next_row = data + (tile_row + begin) * features + column;

    for (int i = begin; i < end; i += kInFlight) {
      Vector<T, kVec> values[kInFlight];
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
          values[u] = LoadStreaming<T, kVec>(data + data_row * features + column);
        } else {
          values[u] = LoadStreaming<T, kVec>(next_row);
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
          cell = segment == kDropped ? -1 : (first_segment + segment) * features + column;
          if (segment != kDropped && column == 0) a.present[first_segment + segment] = 1;
          accumulator.Start();
        }
        accumulator.Add(values[u], row[u], a.first_wins);
      }
      coming_starts >>= kInFlight;
    }
    store_run();
  }

  // Merge the pieces of each long run within the block: after a step, the piece of a group whose run still `goes_on`
  // covers `2 * step` groups.
  __shared__ bool shared_goes_on[kTileThreads];
  if (group < a.groups) shared_goes_on[group] = goes_on;
  const bool starts_piece = has_piece && (group == 0 || shared.starts[group] != 0);
  if (__syncthreads_or(goes_on)) {
    for (int step = 1; step < a.groups; step *= 2) {
      bool next_goes_on = false;
      if (goes_on) {
        Accumulator<T, kVec, kWithWinner> other;
        const int partner = threadIdx.x + step * a.features.lanes;
        accumulator.Load(shared.SlotBest(threadIdx.x), shared.SlotWinner(threadIdx.x));
        other.Load(shared.SlotBest(partner), shared.SlotWinner(partner));
        accumulator.Merge(other, a.first_wins);
        next_goes_on = group + 2 * step < a.groups && shared_goes_on[group + step];
      }
      const bool is_last = !__syncthreads_or(next_goes_on);
      if (goes_on) {
        accumulator.Store(shared.SlotBest(threadIdx.x), shared.SlotWinner(threadIdx.x));
        shared_goes_on[group] = next_goes_on;
      }
      goes_on = next_goes_on;
      if (is_last) break;
      __syncthreads();
    }
  }

  if (threadIdx.x == 0 && column_block == 0) a.pieces.segment[row_block] = has_piece ? head_segment : kDropped;
  if (starts_piece) {
    accumulator.Load(shared.SlotBest(threadIdx.x), shared.SlotWinner(threadIdx.x));
    if (group == 0) {
      const int64_t slot = row_block * features + column;
      accumulator.Store(a.pieces.best + slot, a.pieces.winner + slot);
    } else {
      // The run's owner is the group before, which stored its own rows above.
      Accumulator<T, kVec, kWithWinner> owner;
      const int64_t cell = (first_segment + head_segment) * features + column;
      owner.Load(a.output + cell, a.winner + cell);
      owner.Merge(accumulator, a.first_wins);
      owner.Store(a.output + cell, a.winner + cell);
    }
  }
}

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeWindow = kMergeThreads;  // slots of pieces that a block looks at
inline constexpr int kShortRun = 32;

// Folds the pieces that TileKernel left, one slot a block of tiles, into the output. It takes two levels, so that a hot
// segment keeps many blocks busy: the first reduces within windows of slots, and leaves what it makes of a run that
// enters a window in the window's first slot; the second folds those.
//
// A block takes the runs of pieces that begin in its window: a group of threads a short run, the whole block a long
// one.
template <typename T, int kVec, bool kWithWinner, int kLevel>
__device__ __forceinline__ void MergePieces(const TileArguments<T>& a, int64_t slots, int64_t block) {
  using Cells = Accumulator<T, kVec, kWithWinner>;
  __shared__ int run_starts[kMergeWindow];
  __shared__ int runs, in_run;
  __shared__ Vector<T, kVec> shared_best[kMergeThreads];
  __shared__ Vector<int32_t, kWithWinner ? kVec : 1> shared_winner[kMergeThreads];

  constexpr int kSlotStep = kLevel == 1 ? 1 : kMergeWindow;
  const int64_t count = CeilDivide(slots, kSlotStep);
  const int64_t window = block / a.features.columns * kMergeWindow;
  const int64_t limit = kLevel == 1 ? min(count, window + kMergeWindow) : count;
  const int groups = kMergeThreads / a.features.lanes;
  const int group = threadIdx.x / a.features.lanes;
  const int64_t column =
      (block % a.features.columns * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const bool is_active = group < groups && column < a.problem.features;

  const auto enters_window = [&](int64_t slot) {
    return slot > 0 && a.pieces.segment[slot - 1] == a.pieces.segment[slot];
  };
  // What pieces of one run have in common. The element of the batch is part of it at the second level, which sees the
  // first slots of windows only and not the empty slot with which an element begins.
  constexpr int64_t kNoRun = -1;
  const auto run_at = [&](int64_t i) {
    const int64_t slot = i * kSlotStep;
    const uint32_t segment = a.pieces.segment[slot];
    if (segment == kDropped || (kLevel == 2 && !enters_window(slot))) return kNoRun;
    return kLevel == 1 ? int64_t{segment} : slot / a.blocks_per_batch * int64_t{kDropped} + segment;
  };

  if (threadIdx.x == 0) runs = 0;
  __syncthreads();
  const int64_t own = window + threadIdx.x;
  if (own < limit) {
    const int64_t run = run_at(own);
    const bool begins = own == 0 || (kLevel == 1 && threadIdx.x == 0) || run_at(own - 1) != run;
    if (run != kNoRun && begins) run_starts[atomicAdd(&runs, 1)] = threadIdx.x;
  }
  __syncthreads();

  const auto load = [&](int64_t i) {
    Cells cells;
    const int64_t offset = i * kSlotStep * a.problem.features + column;
    cells.Load(a.pieces.best + offset, a.pieces.winner + offset);
    return cells;
  };
  // Pieces first, first + step, ... below `end`.
  const auto reduce = [&](int64_t first, int64_t end, int step) {
    constexpr int kInFlight = 4;
    Cells cells = load(first);
    for (int64_t i = first + step; i < end; i += kInFlight * step) {
      Cells others[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (i + u * step < end) others[u] = load(i + u * step);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (i + u * step < end) cells.Merge(others[u], a.first_wins);
      }
    }
    return cells;
  };
  const auto finish_run = [&](const Cells& cells, int64_t begin) {
    const int64_t slot = begin * kSlotStep;
    if (kLevel == 1 && begin == window && enters_window(slot)) {
      const int64_t offset = slot * a.problem.features + column;
      cells.Store(a.pieces.best + offset, a.pieces.winner + offset);
      return;
    }
    const int64_t b = slot / a.blocks_per_batch;
    const int64_t cell = (b * a.problem.segments + a.pieces.segment[slot]) * a.problem.features + column;
    Cells output;
    output.Load(a.output + cell, a.winner + cell);
    output.Merge(cells, a.first_wins);
    output.Store(a.output + cell, a.winner + cell);
  };

  for (int run = group; is_active && run < runs; run += groups) {
    const int64_t begin = window + run_starts[run];
    const int64_t id = run_at(begin);
    int64_t end = begin + 1;
    while (end < limit && end <= begin + kShortRun && run_at(end) == id) ++end;
    if (end <= begin + kShortRun) finish_run(reduce(begin, end, 1), begin);
  }

  for (int run = 0; run < runs; ++run) {
    const int64_t begin = window + run_starts[run];
    if (begin + kShortRun >= limit) continue;
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
    if (end <= begin + kShortRun) continue;
    const bool takes_part = is_active && begin + group < end;
    if (takes_part) {
      const Cells cells = reduce(begin + group, end, groups);
      cells.Store(&shared_best[threadIdx.x].lane[0], &shared_winner[threadIdx.x].lane[0]);
    }
    for (int left = groups; left > 1; left = (left + 1) / 2) {
      const int half = (left + 1) / 2;
      const int partner = threadIdx.x + half * a.features.lanes;
      __syncthreads();
      if (takes_part && group + half < left && begin + group + half < end) {
        Cells mine, other;
        mine.Load(&shared_best[threadIdx.x].lane[0], &shared_winner[threadIdx.x].lane[0]);
        other.Load(&shared_best[partner].lane[0], &shared_winner[partner].lane[0]);
        mine.Merge(other, a.first_wins);
        mine.Store(&shared_best[threadIdx.x].lane[0], &shared_winner[threadIdx.x].lane[0]);
      }
    }
    if (takes_part && group == 0) {
      Cells cells;
      cells.Load(&shared_best[threadIdx.x].lane[0], &shared_winner[threadIdx.x].lane[0]);
      finish_run(cells, begin);
    }
    __syncthreads();
  }
}

inline constexpr int kFillSegments = 4 * kMergeThreads;  // of a block

// The identity of the maximum for the segments that have no row; for all of them where `present` is nullptr.
template <typename T, int kVec, bool kWithWinner>
__device__ __forceinline__ void FillAbsent(const TileArguments<T>& a, int64_t block) {
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
  for (int i = group; i < count; i += groups) {
    if (reinterpret_cast<const uint8_t*>(shared_present)[i] != 0) continue;
    const int64_t cell = (first_segment + i) * a.problem.features + column;
    StoreVector(a.output + cell, Repeat<kVec>(MaxIdentity<T>()));
    if constexpr (kWithWinner) StoreVector(a.winner + cell, Repeat<kVec>(kNoWinner));
  }
}

template <typename T, int kVec, bool kWithWinner>
__global__ void __launch_bounds__(kMergeThreads) MergeWindowsKernel(const __grid_constant__ TileArguments<T> a,
                                                                    int64_t slots) {
  MergePieces<T, kVec, kWithWinner, 1>(a, slots, blockIdx.x);
}

// The last pass over the output: what is left of the pieces, and the segments without rows.
template <typename T, int kVec, bool kWithWinner>
__global__ void __launch_bounds__(kMergeThreads) FinishKernel(const __grid_constant__ TileArguments<T> a, int64_t slots,
                                                              int64_t merge_blocks) {
  if (blockIdx.x < merge_blocks) {
    MergePieces<T, kVec, kWithWinner, 2>(a, slots, blockIdx.x);
  } else {
    FillAbsent<T, kVec, kWithWinner>(a, blockIdx.x - merge_blocks);
  }
}

}  // namespace jax_baracuda::segment
