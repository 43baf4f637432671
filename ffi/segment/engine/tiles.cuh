// Reduction of sorted rows, either in memory order or through a permutation.
//
// Rows are cut into tiles of 32, independent of segments, so a hot segment costs no more than other rows. Each tile is
// reduced by a group of threads, one vector of features per thread, which walks down the rows with the accumulator in
// registers. The `starts` word of a tile has a bit for each row that starts a run (consecutive rows of one segment). It
// alone determines which group reduces which rows:
//
//   * The tile in which a run starts owns it, and reads on into the next tile to the run's end.
//   * A run that covers the whole next tile (whose `starts` is 0) is long. Its owner stops at the end of its own tile,
//     and every later tile of the run reduces its own rows into a carry-in. The carry-ins of one block are merged in
//     shared memory. Each block leaves at most one carry-in, of a run that enters it, and one carry-out, of a run that
//     starts in it and leaves it. MergeCarries folds those.
//
// No two threads write the same cell, and the order of merges depends on shapes and ids only. So results are bit-equal
// from run to run; the atomic counters only find the last block. Empty segments are the gaps between runs (see
// gaps.cuh). A narrow gap is filled by the tile in which the next run starts, wide ones by the first blocks of the
// grid. Unsorted ids give wrong results, but no access out of bounds and no endless loop: only `starts` controls the
// loops over rows, and narrow gaps are bounded.
#pragma once

#include <algorithm>

#include "ffi/core/warp.cuh"
#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/gaps.cuh"
#include "ffi/segment/engine/gathering.cuh"
#include "ffi/segment/engine/reduction.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

inline constexpr int kTileRows = 32;

// Where a thread reads the rows of its tile.
enum class RowSource {
  kDirect,    // in memory order
  kOrdered,   // through the sort order
  kGathered,  // from another array, at the gather ids
};

// Small blocks: a block that waits for its ids leaves other blocks running, and the last blocks end close together.
inline constexpr int kMaxTileThreads = 128;

// At least four tiles per block: each block leaves up to two carries, which MergeKernel has to fold. Blocks of half as
// many threads took 1.04 times as long (H200, mean of 50 calls).
inline int TileThreads(int lanes) { return lanes > 16 ? kMaxTileThreads : 64; }

// The Input of rows that are not gathered.
template <typename T>
struct OwnRows {
  static constexpr bool kNeedsEdges = false, kSharesLanes = false;
  template <int kVec>
  using Row = RowInFlight<T, kVec>;
};

// The Input of rows that are computed from two arrays, the data and `second`: instead of Add, the accumulator has
// AddPair(values of data, values of second).
template <typename T>
struct RowPairs {
  static constexpr bool kNeedsEdges = false, kSharesLanes = false;

  const T* second;  // [batch or 1, rows, features]
  bool second_is_shared;

  void Advance(int64_t element, int64_t rows, int64_t features) {
    if (!second_is_shared) second += element * rows * features;
  }

  template <int kVec>
  struct Row : RowInFlight<T, kVec> {
    Packed<T, kVec> second_values;

    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs&) const {
      cells.AddPair(Unpack<T, kVec>(this->values), Unpack<T, kVec>(second_values));
    }
  };
};

template <typename Input>
inline constexpr bool kHasPairs = false;
template <typename T>
inline constexpr bool kHasPairs<RowPairs<T>> = true;

// With the Input of the rows (see gathering.cuh).
template <typename Reduction, typename Input>
struct InputArguments : TileArguments<Reduction> {
  Input input;
};

// Resets the counters of MergeKernel, which is launched next.
template <typename Reduction>
__device__ __forceinline__ void PrepareMerge(const TileArguments<Reduction>& a) {
  if (blockIdx.x == 0 && threadIdx.x < 2) a.merge_counters[threadIdx.x] = 0;
}

// Stride of a tile in shared memory, padded to avoid bank conflicts between groups that read the same row of their
// tiles.
inline constexpr int kPaddedTileRows = kTileRows + 1;

template <typename Reduction, typename Input, int kVec, RowSource kSource>
struct TileShared {
  using Cells = typename Reduction::template Accumulator<kVec>;

  Cells* carry_ins;    // of the groups' tiles, one per thread
  uint32_t* order;     // [(groups + 1) * kPaddedTileRows], data row of each row, if kWithOrder
  uint32_t* edges;     // [(groups + 1) * kPaddedTileRows], edge of each row, if kWithEdges
  uint32_t* segments;  // [(groups + 1) * kPaddedTileRows], from the tile before the block on
  uint32_t* starts;    // [groups + 2], from the tile before the block to the one after it
  uint32_t* gaps;      // [groups], bit mask: rows that follow a narrow gap

  static constexpr int kCarryInBytes = RoundUp(kMaxTileThreads * sizeof(Cells), kVectorBytes);
  static constexpr bool kWithOrder = kSource == RowSource::kOrdered || kSource == RowSource::kGathered;
  static constexpr bool kWithEdges = Input::kNeedsEdges;
  static constexpr int kArrays = 1 + kWithOrder + kWithEdges;

  static int Bytes(int groups) {
    const int words = 2 * groups + 2 + kArrays * (groups + 1) * kPaddedTileRows;
    return kCarryInBytes + words * 4;
  }

  // The order comes first: each row reads it, and its place does not depend on the number of groups.
  __device__ TileShared(uint4* shared, int groups) : carry_ins(reinterpret_cast<Cells*>(shared)) {
    order = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared) + kCarryInBytes);
    edges = order + (kWithOrder ? (groups + 1) * kPaddedTileRows : 0);
    segments = edges + (kWithEdges ? (groups + 1) * kPaddedTileRows : 0);
    starts = segments + (groups + 1) * kPaddedTileRows;
    gaps = starts + groups + 2;
  }
};

// Writes the starts of the block's tiles and of the tiles before and after it, the gaps and the segments to shared
// memory.
template <typename Shared, typename SegmentOf, typename SourceOf>
__device__ __forceinline__ void FindStarts(const Shared& shared, int tiles, int64_t first_row, int64_t rows,
                                           SegmentOf&& segment_of, SourceOf&& source_of) {
  constexpr int kTilesInFlight = 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  // Each warp has neighbouring tiles, so that the previous row's segment is in a register.
  const int share = (tiles + 2 + warps - 1) / warps;
  const int begin = warp * share - 1, end = min(begin + share, tiles + 1);
  const int64_t row_before = first_row + static_cast<int64_t>(begin) * kTileRows - 1;
  uint32_t before = begin < end && row_before >= 0 && row_before < rows ? segment_of(row_before) : kDropped;
  for (int tile = begin; tile < end; tile += kTilesInFlight) {
    uint32_t segment[kTilesInFlight];
    SourceRow source[kTilesInFlight];
#pragma unroll
    for (int u = 0; u < kTilesInFlight; ++u) {
      const int64_t row = first_row + static_cast<int64_t>(tile + u) * kTileRows + lane;
      const bool exists = tile + u < end && row >= 0 && row < rows;
      segment[u] = exists ? segment_of(row) : kDropped;
      if (Shared::kWithOrder) source[u] = exists ? source_of(row) : SourceRow{};
    }
#pragma unroll
    for (int u = 0; u < kTilesInFlight; ++u) {
      if (tile + u >= end) break;
      const int64_t row = first_row + static_cast<int64_t>(tile + u) * kTileRows + lane;
      uint32_t previous = __shfl_up_sync(kFullWarp, segment[u], 1);
      if (lane == 0) previous = before;
      before = __shfl_sync(kFullWarp, segment[u], 31);
      // The row past the last one counts as a start, to end the last run.
      const uint32_t starts = __ballot_sync(kFullWarp, row <= 0 || row >= rows || segment[u] != previous);
      const uint32_t gaps = __ballot_sync(kFullWarp, IsNarrowGap(previous, segment[u]));
      if (lane == 0) {
        shared.starts[tile + u + 1] = starts;
        if (tile + u >= 0 && tile + u < tiles) shared.gaps[tile + u] = gaps;
      }
      const int padded = (tile + u) * kPaddedTileRows + lane;
      if (tile + u < tiles) shared.segments[padded + kPaddedTileRows] = segment[u];
      if (Shared::kWithOrder && tile + u >= 0) shared.order[padded] = source[u].row;
      if (Shared::kWithEdges && tile + u >= 0) shared.edges[padded] = source[u].edge;
    }
  }
}

// Indirect rows need more registers, for their addresses.
template <typename Reduction, RowSource kSource>
inline constexpr int kTileBlocks =
    (kSource == RowSource::kOrdered || kSource == RowSource::kGathered) && Reduction::kTileBlocks > 6
        ? 6
        : Reduction::kTileBlocks;

template <typename Reduction, typename Input, int kVec, RowSource kSource>
__global__ void __launch_bounds__(kMaxTileThreads, (kTileBlocks<Reduction, kSource>))
    TileKernel(const __grid_constant__ InputArguments<Reduction, Input> a) {
  using T = typename Reduction::Element;
  using Cells = typename Reduction::template Accumulator<kVec>;
  constexpr int kInFlight = Reduction::kRowsInFlight;
  extern __shared__ uint4 shared_memory[];
  using Shared = TileShared<Reduction, Input, kVec, kSource>;
  const Shared shared(shared_memory, a.groups);
  PrepareMerge(a);
  if (blockIdx.x < a.gap_blocks) {
    FillWideGaps<Reduction, kVec>(a);
    return;
  }

  const uint32_t block = blockIdx.x - a.gap_blocks;
  const int64_t row_block = block / a.features.columns;
  const int column_block = block % a.features.columns;
  const int64_t b = row_block / a.blocks_per_batch;
  const int64_t first_row = (row_block - b * a.blocks_per_batch) * a.groups * kTileRows;
  const int64_t rows = a.problem.rows, features = a.problem.features;
  const bool is_whole = kSource == RowSource::kGathered || a.problem.data_is_shared;  // no offset per batch element
  const T* data = a.data + (is_whole ? 0 : b * rows * features);
  const T* second = nullptr;
  if constexpr (kHasPairs<Input>) second = a.input.second + (a.input.second_is_shared ? 0 : b * rows * features);
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * rows;
  const uint32_t batch_rows = static_cast<uint32_t>(a.batch_rows);
  const bool is_joined = a.batch_rows != rows;
  const auto segment_of = [&](int64_t row) {
    if (kSource == RowSource::kOrdered) {
      const uint32_t segment = __ldg(a.sorted_segments + row);
      return segment < a.problem.segments ? segment : kDropped;
    } else {
      return a.ids[ids_offset + row];
    }
  };
  FindStarts(shared, a.groups, first_row, rows, segment_of, [&](int64_t row) -> SourceRow {
    if constexpr (kSource == RowSource::kGathered) {
      return a.input.template Source<Input::kNeedsEdges>(b, row, rows, a.problem.data_is_shared);
    }
    const uint32_t joined_row = __ldg(a.order + row);
    const bool is_own_row = is_joined && a.problem.data_is_shared && !kHasPairs<Input>;
    return {is_own_row ? joined_row % batch_rows : joined_row, 0};
  });
  __syncthreads();

  const int group = threadIdx.x / a.features.lanes;
  const int64_t own_column =
      (static_cast<int64_t>(column_block) * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const int64_t tile_row = first_row + group * kTileRows;
  const bool is_active = group < a.groups && own_column < features && tile_row < rows;
  const int64_t column = is_active ? own_column : 0;  // Prepare may read at this column

  Cells cells;
  const int64_t first_segment = a.first_segment + b * a.problem.segments;
  const uint32_t* segments = shared.segments + (group + 1) * kPaddedTileRows;
  uint32_t carry_in_segment = kDropped;
  int64_t run_segment = -1;                      // result segment of the current run; negative if it is dropped
  bool has_carry_in = false, continues = false;  // continues: into the next group's tile
  uint32_t starts = 0, after = 0;
  int begin = 0, end = 0;  // the rows of the tile that this group reduces

  if (is_active) {
    const uint32_t before = shared.starts[group];
    starts = shared.starts[group + 1];
    after = shared.starts[group + 2];
    for (uint32_t gaps = a.gap_blocks == 0 ? 0 : shared.gaps[group]; gaps != 0; gaps &= gaps - 1) {
      const int row = __ffs(gaps) - 1;
      // Index -2 skips the word of padding between tiles.
      const uint32_t segment_before = segments[row == 0 ? -2 : row - 1];
      FillGap<Reduction, kVec>(a.outputs, first_segment + segment_before + 1, first_segment + segments[row], features,
                               column);
    }

    carry_in_segment = segments[0];
    const bool enters = (starts & 1) == 0;
    has_carry_in = enters && (starts == 0 || before == 0) && carry_in_segment != kDropped;
    continues = has_carry_in && starts == 0 && (after & 1) == 0 && group + 1 < a.groups;

    // An entering run that is not long belongs to the previous tile.
    begin = enters && !has_carry_in ? (starts == 0 ? kTileRows : __ffs(starts) - 1) : 0;
    end = rows - tile_row < kTileRows ? static_cast<int>(rows - tile_row) : kTileRows;
    if (starts != 0 && end == kTileRows && after != 0) end += __ffs(after) - 1;
  }

  bool is_carry_in = has_carry_in;
  const auto store_run = [&] {
    if (is_carry_in) {
      shared.carry_ins[threadIdx.x] = cells;
    } else if (run_segment >= 0) {
      cells.Store(a.outputs, run_segment, features, column);
    }
  };
  cells.Start();
  uint32_t remaining_starts = begin < kTileRows ? starts >> begin : 0;
  const T* next_row = data + (tile_row + begin) * features + column;
  int64_t at = 0;
  if constexpr (kSource == RowSource::kGathered) at = a.input.At(b, rows, column);

  const int first_place = group * kPaddedTileRows;
  int steps_end = end;
  if constexpr (Input::kSharesLanes) steps_end = begin + __reduce_max_sync(kFullWarp, end - begin);
  for (int i = begin; i < steps_end; i += kInFlight) {
    typename Input::template Row<kVec> in_flight[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int tile_offset = i + u;
      if constexpr (kSource != RowSource::kGathered) in_flight[u].number = static_cast<int32_t>(tile_row) + tile_offset;
      if (tile_offset >= end) continue;
      if constexpr (kSource == RowSource::kOrdered) {
        uint32_t data_row = shared.order[first_place + tile_offset + (tile_offset >= kTileRows)];
        in_flight[u].number = is_joined ? data_row % batch_rows : data_row;
        if constexpr (kHasPairs<Input>) {
          const uint32_t second_row = is_joined && a.input.second_is_shared ? data_row % batch_rows : data_row;
          in_flight[u].second_values = LoadPackedStreaming<kVec>(second + column + FirstElement(second_row, features));
          if (is_joined && a.problem.data_is_shared) data_row %= batch_rows;
        }
        in_flight[u].values = LoadPackedStreaming<kVec>(data + column + FirstElement(data_row, features));
      } else if constexpr (kSource == RowSource::kGathered) {
        const int place = first_place + tile_offset + (tile_offset >= kTileRows);
        const SourceRow source{shared.order[place], Shared::kWithEdges ? shared.edges[place] : 0};
        const uint32_t own = segments[tile_offset < kTileRows ? tile_offset : kTileRows - 1];
        in_flight[u].Load(a.input, data, source, {own == kDropped ? -1 : first_segment + own, features, column, at});
      } else {
        in_flight[u].values = LoadPackedStreaming<kVec>(next_row);
        if constexpr (kHasPairs<Input>) {
          in_flight[u].second_values = LoadPackedStreaming<kVec>(second + (next_row - data));
        }
        next_row += features;
      }
    }
    // Also for rows past the end: their results are not used, and a branch would keep rows from overlapping.
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) in_flight[u].Prepare(a.outputs, column);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (i + u >= end) break;
      if ((remaining_starts >> u) & 1) {
        store_run();
        is_carry_in = false;
        const uint32_t segment = segments[i + u];
        run_segment = segment == kDropped ? -1 : first_segment + segment;
        cells.Start();
      }
      in_flight[u].AddTo(cells, a.outputs);
    }
    remaining_starts >>= kInFlight;
  }
  // A tile whose starts are 0 is complete, since the row past the last one counts as a start.
  const bool owns_long_run = starts != 0 && after == 0 && run_segment >= 0;
  if (!owns_long_run) store_run();

  // Merge the carry-ins of each long run within the block. After each step, the carry-in of a group that still
  // `continues` covers `2 * step` groups.
  __shared__ bool shared_continues[kMaxTileThreads];
  // Only the first lane writes the flag of its group: in the last column block the other lanes may be inactive.
  const bool writes_flag = group < a.groups && threadIdx.x % a.features.lanes == 0;
  if (writes_flag) shared_continues[group] = continues;
  if (__syncthreads_or(continues)) {
    for (int step = 1; step < a.groups; step *= 2) {
      Cells merged;
      bool next_continues = false;
      if (continues) {
        merged = shared.carry_ins[threadIdx.x];
        merged.Merge(shared.carry_ins[threadIdx.x + step * a.features.lanes], a.outputs);
        next_continues = group + 2 * step < a.groups && shared_continues[group + step];
      }
      const bool is_last = !__syncthreads_or(next_continues);
      if (continues) {
        shared.carry_ins[threadIdx.x] = merged;
        if (writes_flag) shared_continues[group] = next_continues;
      }
      continues = next_continues;
      __syncthreads();
      if (is_last) break;
    }
  }

  const int64_t vector = row_block * (features / kVec) + column / kVec;
  if (owns_long_run) {
    // The next group's carry-in holds those of all later groups.
    if (group + 1 < a.groups) cells.Merge(shared.carry_ins[threadIdx.x + a.features.lanes], a.outputs);
    int next = group + 1;
    while (next < a.groups && shared.starts[next + 1] == 0) ++next;
    const uint32_t last = shared.starts[a.groups], after = shared.starts[a.groups + 1];
    const bool leaves_block = next == a.groups && (after & 1) == 0 && (after == 0 || last == 0);
    if (leaves_block) {
      static_cast<Cells*>(a.carries.out)[vector] = cells;
    } else {
      cells.Store(a.outputs, run_segment, features, column);
    }
  }
  if (threadIdx.x == 0 && column_block == 0) {
    a.carries.in_segment[row_block] = has_carry_in ? carry_in_segment : kDropped;
  }
  if (group == 0 && has_carry_in) static_cast<Cells*>(a.carries.in)[vector] = shared.carry_ins[threadIdx.x];
}

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeCarries = 128;  // per block of MergeKernel; each is of one block of rows
inline constexpr int kShortRun = 32;
inline constexpr int64_t kMaxMergeParts = 8;

template <typename Cells>
struct MergeShared {
  Cells cells[kMergeThreads];
  int run_starts[kMergeCarries], long_runs[kMergeCarries];
  uint32_t run_bounds[kMergeCarries / 32];  // bit mask: carries that do not continue the run of the previous one
  int runs, long_run_count, in_run;

  // The end of this carry's run: the first later carry of another run, or kMergeCarries.
  __device__ int RunEnd(int carry) const {
    int word = (carry + 1) / 32;
    uint32_t bounds = word < kMergeCarries / 32 ? run_bounds[word] & (kFullWarp << (carry + 1) % 32) : 0;
    while (bounds == 0 && ++word < kMergeCarries / 32) bounds = run_bounds[word];
    return bounds == 0 ? kMergeCarries : word * 32 + __ffs(bounds) - 1;
  }
};

// Folds the carries of the blocks of rows into the output. Two levels keep many blocks busy for a hot segment. At level
// 1, a block reduces within its kMergeCarries carries. A run that enters them becomes the carry-in of the first, a run
// that leaves them the carry-out of the last. Level 2 folds these.
//
// A block handles the runs that begin in its carries: one group of threads per short run, the whole block per long run.
// At level 1, `parts` blocks share these carries. Runs of all lengths pass through one loop, so that the code stays small.
template <typename Reduction, int kVec, int kLevel>
__device__ __forceinline__ void MergeCarries(const TileArguments<Reduction>& a, int64_t block, int part, int parts,
                                             MergeShared<typename Reduction::template Accumulator<kVec>>& shared) {
  using Cells = typename Reduction::template Accumulator<kVec>;

  constexpr int kCarryStep = kLevel == 1 ? 1 : kMergeCarries;
  const int64_t carries = a.row_blocks;
  const int64_t count = CeilDivide(carries, kCarryStep);
  const int64_t first_carry = block / a.features.columns * kMergeCarries;
  const int64_t limit = kLevel == 1 ? min(count, first_carry + kMergeCarries) : count;
  const int groups = kMergeThreads / a.features.lanes;
  const int group = threadIdx.x / a.features.lanes;
  const int64_t column = (block % a.features.columns * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const bool is_active = group < groups && column < a.problem.features;
  const uint32_t* const segments = a.carries.in_segment;
  Cells* const carry_ins = static_cast<Cells*>(a.carries.in) + column / kVec;
  Cells* const carry_outs = static_cast<Cells*>(a.carries.out) + column / kVec;
  const int64_t row_vectors = a.problem.features / kVec;

  const auto is_entered = [&](int64_t carry) { return carry > 0 && segments[carry - 1] == segments[carry]; };
  // The key of a run. Level 2 includes the batch element: it sees only the first carry of each block, and so not the
  // empty carry with which a batch element begins.
  constexpr int64_t kNoRun = -1;
  const auto run_at = [&](int64_t i) {
    const int64_t carry = i * kCarryStep;
    const uint32_t segment = segments[carry];
    if (segment == kDropped || (kLevel == 2 && !is_entered(carry))) return kNoRun;
    return kLevel == 1 ? int64_t{segment} : carry / a.blocks_per_batch * int64_t{kDropped} + segment;
  };

  if (threadIdx.x == 0) shared.runs = shared.long_run_count = 0;
  __syncthreads();
  const int64_t own = first_carry + threadIdx.x;
  const int64_t own_run = own < min(limit, first_carry + kMergeCarries) ? run_at(own) : kNoRun;
  const bool is_bound = own >= limit || own == 0 || (kLevel == 1 && threadIdx.x == 0) || run_at(own - 1) != own_run;
  const uint32_t bounds = __ballot_sync(kFullWarp, is_bound);
  if (threadIdx.x < kMergeCarries && threadIdx.x % 32 == 0) shared.run_bounds[threadIdx.x / 32] = bounds;
  const int own_carries = static_cast<int>(min(limit - first_carry, int64_t{kMergeCarries}));
  const bool is_own = static_cast<int>(threadIdx.x) * parts / own_carries == part;
  if (own_run != kNoRun && is_bound && is_own) shared.run_starts[atomicAdd(&shared.runs, 1)] = threadIdx.x;
  __syncthreads();

  // Merges the carry-ins first, first + step, ... below `end`.
  const auto reduce = [&](int64_t first, int64_t end, int step) {
    constexpr int kInFlight = sizeof(Cells) <= 16 ? 4 : 2;
    const Cells* next = carry_ins + first * kCarryStep * row_vectors;
    const int64_t stride = step * kCarryStep * row_vectors;
    Cells cells = *next;
    for (int64_t left = end - first - step; left > 0; left -= kInFlight * step) {
      Cells others[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        next += stride;
        if (u * step < left) others[u] = *next;
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (u * step < left) cells.Merge(others[u], a.outputs);
      }
    }
    return cells;
  };
  // Whether the run of the carry-ins from `begin` on started in the carries of an earlier block.
  const auto started_earlier = [&](int64_t begin) { return kLevel == 1 && begin == first_carry && is_entered(begin); };
  // Finishes the run of the carry-ins [begin, end), which starts with the carry-out `cells`.
  const auto finish_run = [&](Cells cells, const Cells& reduced, int64_t begin, int64_t end) {
    const int64_t carry = begin * kCarryStep;
    if (started_earlier(begin)) {
      carry_ins[carry * row_vectors] = reduced;
      return;
    }
    cells.Merge(reduced, a.outputs);
    if (kLevel == 1 && end == limit && end < carries && segments[end] == segments[carry]) {
      carry_outs[(end - 1) * row_vectors] = cells;
      return;
    }
    // Blocks are numbered in 32 bits.
    const int64_t b = static_cast<uint32_t>(carry) / static_cast<uint32_t>(a.blocks_per_batch);
    cells.Store(a.outputs, a.first_segment + b * a.problem.segments + segments[carry], a.problem.features, column);
  };

  const int short_steps = (shared.runs + groups - 1) / groups;
  for (int step = 0;; ++step) {
    const bool is_short = step < short_steps;
    if (step == short_steps) __syncthreads();
    if (!is_short && step - short_steps >= shared.long_run_count) break;
    const int run = step * groups + group;
    bool participates = !is_short || (group < groups && run < shared.runs);
    int64_t begin = 0, end = 0;
    if (participates) {
      const int start = is_short ? shared.run_starts[run] : shared.long_runs[step - short_steps];
      const int end_in_block = shared.RunEnd(start);
      const bool continues = kLevel == 2 && end_in_block == kMergeCarries && first_carry + end_in_block < limit;
      begin = first_carry + start;
      end = first_carry + end_in_block;
      if (is_short && (end_in_block - start > kShortRun || continues)) {
        if (threadIdx.x % a.features.lanes == 0) shared.long_runs[atomicAdd(&shared.long_run_count, 1)] = start;
        participates = false;
      } else if (continues) {
        const int64_t id = run_at(begin);
        for (int belonging = kMergeThreads; belonging == kMergeThreads; end += belonging) {
          if (threadIdx.x == 0) shared.in_run = kMergeThreads;
          __syncthreads();
          const int64_t i = end + threadIdx.x;
          if (i >= limit || run_at(i) != id) atomicMin(&shared.in_run, static_cast<int>(threadIdx.x));
          __syncthreads();
          belonging = shared.in_run;
          __syncthreads();
        }
      }
    }
    const int64_t first = is_short ? begin : begin + group;
    participates = participates && is_active && first < end;
    // The run started in the previous block of rows, or level 1 moved its carry-out there. Loaded now, it is in flight
    // together with the carry-ins.
    Cells start, reduced;
    const bool finishes = participates && (is_short || group == 0);
    if (finishes && !started_earlier(begin)) start = carry_outs[(begin * kCarryStep - 1) * row_vectors];
    if (participates) reduced = reduce(first, end, is_short ? 1 : groups);
    if (!is_short) {
      if (participates) shared.cells[threadIdx.x] = reduced;
#pragma unroll 1
      for (int left = groups; left > 1; left = (left + 1) / 2) {
        const int half = (left + 1) / 2;
        __syncthreads();
        if (participates && group + half < left && begin + group + half < end) {
          reduced.Merge(shared.cells[threadIdx.x + half * a.features.lanes], a.outputs);
          shared.cells[threadIdx.x] = reduced;
        }
      }
      __syncthreads();
    }
    if (finishes) finish_run(start, reduced, begin, end);
  }
}

// Blocks that share kMergeCarries carries: as many as keep the multiprocessors busy, if there are few carries.
inline int64_t MergeParts(int64_t blocks) {
  return std::clamp(Tuning::kMultiprocessors / std::max(blocks, int64_t{1}), int64_t{1}, kMaxMergeParts);
}

// All blocks run level 1. The last block to finish runs level 2, if any block has an entering run. One block is enough:
// each step covers kMergeCarries * kMergeCarries carries.
template <typename Reduction, int kVec>
__global__ void __launch_bounds__(kMergeThreads) MergeKernel(const __grid_constant__ TileArguments<Reduction> a) {
  __shared__ MergeShared<typename Reduction::template Accumulator<kVec>> shared;
  __shared__ bool has_second_level;
  const int64_t carries = a.row_blocks, block = blockIdx.x / a.merge_parts;
  MergeCarries<Reduction, kVec, 1>(a, block, blockIdx.x % a.merge_parts, a.merge_parts, shared);
  if (carries <= kMergeCarries) return;  // a single block has all carries

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t first_carry = block / a.features.columns * kMergeCarries;
    const uint32_t* const segments = a.carries.in_segment;
    if (first_carry > 0 && segments[first_carry] != kDropped && segments[first_carry - 1] == segments[first_carry]) {
      atomicAdd(a.merge_counters + 1, 1);
      __threadfence();
    }
    const bool is_last = atomicAdd(a.merge_counters, 1) == gridDim.x - 1;
    __threadfence();
    has_second_level = is_last && atomicAdd(a.merge_counters + 1, 0) != 0;
  }
  __syncthreads();
  if (!has_second_level) return;
  const int64_t blocks = CeilDivide(CeilDivide(carries, kMergeCarries), kMergeCarries) * a.features.columns;
  for (int64_t i = 0; i < blocks; ++i) {
    MergeCarries<Reduction, kVec, 2>(a, i, /*part=*/0, /*parts=*/1, shared);
    __syncthreads();
  }
}

}  // namespace jax_baracuda::segment
