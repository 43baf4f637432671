// Softmax and its gradient for sorted rows, in memory order or through a permutation.
//
// Rows are cut into tiles, one per block. A tile has own rows and reaches beyond them into the next tile. It is staged
// in shared memory. Each thread processes some neighbouring rows, and a segmented scan over the block combines the runs
// (rows of one segment) that threads have in common. A run belongs to the tile in whose own rows it starts. If it ends
// within the tile, the block writes it at once. A longer run is cut at the ends of the tiles' own rows. Each tile
// leaves the state of its own rows of the run: a carry-out in the tile in which the run starts, a carry-in in every
// tile that it enters. LongRunsKernel merges these carries (see engine/tiles.cuh) and writes the rows.
//
// A tile first sums exp(x) (see device.cuh). If a sum is out of range, it recomputes its rows with their maxima.
//
// Unsorted ids give wrong results but no access out of bounds: they only decide which rows of a tile, and which of the
// existing carries, are combined.
#pragma once

#include <cuda_pipeline.h>

#include "ffi/core/warp.cuh"
#include "ffi/segment/engine/reduction.cuh"
#include "ffi/segment/extremum/reduction.cuh"
#include "ffi/segment/softmax/device.cuh"
#include "ffi/segment/softmax/reduction.cuh"

namespace jax_baracuda::segment {

inline constexpr int kSoftmaxTileThreads = 128;
inline constexpr int kSoftmaxTileWarps = kSoftmaxTileThreads / 32;
inline constexpr int kSoftmaxTileBlocks = 7;  // per multiprocessor, limited by its shared memory
inline constexpr int kMaxSoftmaxTileLanes = 8;

// Vector width in elements: narrow, so that a thread holds several rows in registers.
constexpr int SoftmaxTileVector(int64_t features, int64_t element_bytes) {
  const int widest = element_bytes == 8 ? 2 : 4;
  return features % widest == 0 ? widest : 1;
}

// Neighbouring rows per thread. Odd, to avoid bank conflicts between threads that read their k-th row.
constexpr int ThreadRows(int vector, int64_t element_bytes, bool is_backward) {
  if (vector == 1) return element_bytes == 8 ? 7 : 15;
  return is_backward ? 5 : 7;
}

// The segment of a row, numbered over the whole batch; negative if the row is dropped.
using RunKey = int64_t;
inline constexpr RunKey kNoRun = -1;

// Of LongRunsKernel; the tiles reset them.
struct LongRunCounters {
  uint32_t of_merge[2];  // see MergeBlock
  uint32_t started;      // blocks
  uint32_t merged;       // blocks that have finished merging
};

// The rows of the whole batch, sorted by segment.
struct OrderedRows {
  SegmentIds ids;
  const uint32_t* sorted_segments;  // nullptr, or the sorted segments; `order` then has their rows
  const uint32_t* order;
  int64_t count;
  int64_t batch_rows;  // rows per batch element
  int64_t segments;    // of the whole batch
  bool ids_are_shared;

  // Whether ids are 32-bit, in memory order, and of a batch of one.
  __device__ __forceinline__ bool IsPlain() const {
    return batch_rows == count && sorted_segments == nullptr && !ids.are_64_bit;
  }
  __device__ __forceinline__ int64_t BatchOf(int64_t row) const {
    if (batch_rows == count) return 0;
    return count <= 0xffffffff ? static_cast<uint32_t>(row) / static_cast<uint32_t>(batch_rows) : row / batch_rows;
  }
  __device__ __forceinline__ RunKey Key(int64_t row) const {
    if (sorted_segments != nullptr) {
      const uint32_t segment = __ldg(sorted_segments + row);
      return segment < segments ? segment : kNoRun;
    }
    const int64_t b = BatchOf(row);
    const uint32_t segment = ids[ids_are_shared ? row - b * batch_rows : row];
    return segment == kDropped ? kNoRun : b * ids.segments + segment;
  }
  // The row's position in the result, or in an operand that the batch may share.
  __device__ __forceinline__ int64_t Place(int64_t row) const { return order == nullptr ? row : __ldg(order + row); }
  __device__ __forceinline__ int64_t Place(int64_t row, bool is_shared) const {
    const int64_t place = Place(row);
    return is_shared ? place - BatchOf(place) * batch_rows : place;
  }
};

template <typename T, bool kBackward>
struct SoftmaxTileArguments {
  using Total = typename SoftmaxReduction<T, kBackward>::Total;
  OrderedRows rows;
  const T* inputs[2];  // logits; or probabilities and their cotangents
  bool is_shared[2];   // by a batch of more than one
  T* output;
  int64_t features;
  FeatureLanes lanes;
  uint32_t lanes_inverse;   // 2^16 / lanes, rounded up
  int own_rows, tile_rows;  // per tile: its own rows, and all rows that it reaches
  int64_t tiles;
  bool is_flat;  // a tile is contiguous in every operand, and aligned to 16 bytes
  LongRunCounters* counters;
  Carries carries;     // of the tiles; accumulators of SoftmaxReduction
  int32_t* left_rows;  // [tiles, 2]: how many own rows, from the first on and up to the last, are of a long run
  Total* totals;       // [segments, features]: of long runs
};

// How a thread's rows relate to those of other threads. A group of `lanes` threads shares its rows.
struct ThreadRuns {
  uint32_t starts;  // bit mask: the thread's rows that start a run
  int lanes;
  int lane;  // lane in the warp
  int warp;
  int row_lane;                // 0 ... lanes - 1
  int last_lane;               // the first lane of the warp's last group
  int reach;                   // the thread's last run extends at least this many lanes to the left
  uint32_t groups_with_start;  // bit mask: first lanes of groups in which a run starts
  int first_row;               // the thread's first row in the tile
  int head_start;              // first row of the run that continues into the thread's rows; 0 if none
  bool is_left_over;           // not in a complete group: the lane has no rows

  __device__ __forceinline__ bool HasStart() const { return starts != 0; }
  __device__ __forceinline__ int GroupLane() const { return lane - row_lane; }
};

// Stores to shared memory; StoreVector is for global memory.
template <typename T, int kCount>
__device__ __forceinline__ void StoreShared(T* address, const Vector<T, kCount>& vector) {
  *reinterpret_cast<Vector<T, kCount>*>(address) = vector;
}

template <typename C, int kVec, typename Combine>
__device__ __forceinline__ void CombineInto(Vector<C, kVec>& left, const Vector<C, kVec>& right, Combine&& combine) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) left.lane[i] = combine(left.lane[i], right.lane[i]);
}

template <typename C, int kVec>
__device__ __forceinline__ Vector<C, kVec> ShuffleUp(const Vector<C, kVec>& cells, int lanes) {
  Vector<C, kVec> other;
#pragma unroll
  for (int i = 0; i < kVec; ++i) other.lane[i] = __shfl_up_sync(kFullWarp, cells.lane[i], lanes);
  return other;
}

template <typename C, int kVec>
using WarpTails = Vector<C, kVec>[kSoftmaxTileWarps][kMaxSoftmaxTileLanes];

// Computes the total of each run of the tile. The thread in which a run ends writes it to `table` at the run's first
// row. If the run started before the thread's rows, it also calls take(first row, total). `table` begins at the
// thread's row_lane and has row_step cells per row. All threads of the block must call this. Before its first barrier
// it writes only to `tails` and to the cells of the thread's own rows.
template <typename C, int kVec, int kRows, typename Combine, typename Take>
__device__ __forceinline__ void TotalRuns(const ThreadRuns& runs, const Vector<C, kVec> (&values)[kRows], C identity,
                                          C* table, int row_step, WarpTails<C, kVec>& tails,
                                          const bool (&warp_has_start)[kSoftmaxTileWarps], Combine&& combine,
                                          Take&& take) {
  // Within the thread. If its first row starts no run, that row's cells receive the thread's part of the continued run.
  // Cells of rows that start no run may hold anything, which avoids a branch.
  C* const first_cells = table + runs.first_row * row_step;
  C* run_cells = first_cells;
  Vector<C, kVec> scanned = values[0];
#pragma unroll
  for (int k = 1; k < kRows; ++k) {
    const bool starts = (runs.starts >> k) & 1;
    C* const own_cells = first_cells + k * row_step;
    if (!runs.is_left_over) StoreShared(starts ? run_cells : own_cells, scanned);
    run_cells = starts ? own_cells : run_cells;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      scanned.lane[i] = combine(starts ? identity : scanned.lane[i], values[k].lane[i]);
    }
  }

  // Over the warp. `scanned` becomes the thread's last run, as far to the left as it reaches within the warp. `ended`
  // is the run that ends before the thread's first start.
  for (int step = runs.lanes; step <= runs.last_lane; step *= 2) {
    Vector<C, kVec> other = ShuffleUp(scanned, step);
    CombineInto(other, scanned, combine);
#pragma unroll
    for (int i = 0; i < kVec; ++i) scanned.lane[i] = runs.reach >= step ? other.lane[i] : scanned.lane[i];
  }
  Vector<C, kVec> ended = ShuffleUp(scanned, runs.lanes);
  if (runs.GroupLane() == 0) ended = Repeat<kVec>(identity);
  if (runs.HasStart() && (runs.starts & 1) == 0) CombineInto(ended, LoadVector<kVec>(first_cells), combine);
  const bool is_last_group = runs.GroupLane() == runs.last_lane;
  if (is_last_group) tails[runs.warp][runs.row_lane] = scanned;
  __syncthreads();

  // Over the block. Each warp folds, from left to right, the earlier warps that its first run covers.
  const uint32_t warps_with_start =
      __ballot_sync(kFullWarp, runs.lane < kSoftmaxTileWarps && warp_has_start[runs.lane % kSoftmaxTileWarps]);
  const uint32_t earlier = warps_with_start & ((1u << runs.warp) - 1);
  Vector<C, kVec> entering = Repeat<kVec>(identity);
  for (int w = earlier == 0 ? 0 : 31 - __clz(earlier); w < runs.warp; ++w) {
    CombineInto(entering, tails[w][runs.row_lane], combine);
  }
  const bool starts_tile = runs.first_row == 0 && (runs.starts & 1) != 0;
  if (runs.HasStart() && !starts_tile) {
    if ((runs.groups_with_start & ((1u << runs.GroupLane()) - 1)) == 0) {
      CombineInto(entering, ended, combine);
      ended = entering;
    }
    StoreShared(table + runs.head_start * row_step, ended);
    take(runs.head_start, ended);
  }
  if (is_last_group && runs.warp == kSoftmaxTileWarps - 1) {
    if (runs.groups_with_start == 0) {
      CombineInto(entering, scanned, combine);
      scanned = entering;
    }
    StoreShared(runs.HasStart() ? run_cells : table + runs.head_start * row_step, scanned);
  }
  __syncthreads();
}

// State of a tile that follows from its ids.
template <int kRows>
struct SoftmaxTileShared {
  static constexpr int kWords = kSoftmaxTileThreads * kRows / 32 + 1;
  uint32_t starts[kWords];  // bit mask: rows that start a run; each dropped row is a run of its own
  uint32_t dropped[kWords];
  bool carries_in;   // a long run enters the tile
  bool is_cut;       // the run across the end of the tile's own rows is long
  bool carries_out;  // and it starts among the own rows
  int begin, end;    // the rows that the block writes
  bool warp_has_start[kSoftmaxTileWarps];
};

// The bits of the rows [row, row + kRows).
template <int kRows>
__device__ __forceinline__ uint32_t RowBits(const uint32_t* words, int row) {
  return __funnelshift_r(words[row / 32], words[row / 32 + 1], row % 32) & ((1u << kRows) - 1);
}

// The last start before a row, or 0.
__device__ __forceinline__ int LastStart(const uint32_t* words, int row) {
  int word = row / 32;
  uint32_t starts = words[word] & ((1u << (row % 32)) - 1);
  while (starts == 0 && word > 0) starts = words[--word];
  return starts == 0 ? 0 : word * 32 + 31 - __clz(starts);
}

// Finds the starts of runs. The last warp determines whether runs that cross the ends of the tile's own rows are long.
template <typename T, bool kBackward, int kRows>
__device__ __forceinline__ void ReadTile(const SoftmaxTileArguments<T, kBackward>& a, int64_t tile, bool writes_carries,
                                         SoftmaxTileShared<kRows>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_row = tile * a.own_rows;
  constexpr RunKey kOutside = -2;
  const auto key_at = [&](int64_t row) { return row >= 0 && row < a.rows.count ? a.rows.Key(row) : kOutside; };
  const int words = (a.tile_rows + 31) / 32;
  const auto write_word = [&](int word, bool is_start, bool is_dropped) {
    const uint32_t starts = __ballot_sync(kFullWarp, is_start), dropped = __ballot_sync(kFullWarp, is_dropped);
    if (lane == 0) {
      shared.starts[word] = starts;
      shared.dropped[word] = dropped;
    }
  };
  if (a.rows.IsPlain()) {
    constexpr int kInFlight = 4;
    const int* const ids = static_cast<const int*>(a.rows.ids.ids) + first_row + warp * 32 + lane;
    const int left = static_cast<int>(min(a.rows.count - first_row, int64_t{1} << 30)) - warp * 32 - lane;
    const uint32_t segments = static_cast<uint32_t>(min(a.rows.ids.segments, int64_t{1} << 31));
    const bool is_inner = first_row > 0 && first_row + words * 32 <= a.rows.count;
    for (int first = 0; warp + first < words; first += kInFlight * kSoftmaxTileWarps) {
      int own[kInFlight], before[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int skipped = first + u * kSoftmaxTileWarps;
        own[u] = before[u] = -1;
        if (warp + skipped < words && (is_inner || skipped * 32 < left)) {
          own[u] = __ldg(ids + skipped * 32);
          if (is_inner || first_row + (warp + skipped) * 32 + lane > 0) before[u] = __ldg(ids + skipped * 32 - 1);
        }
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int word = warp + first + u * kSoftmaxTileWarps;
        if (word >= words) break;
        const bool is_dropped = static_cast<uint32_t>(own[u]) >= segments;
        write_word(word, is_dropped || own[u] != before[u], is_dropped);
      }
    }
  } else {
#pragma unroll 1
    for (int word = warp; word < words; word += kSoftmaxTileWarps) {
      const int64_t row = first_row + word * 32 + lane;
      const RunKey key = key_at(row);
      RunKey before = __shfl_up_sync(kFullWarp, key, 1);
      if (lane == 0) before = key_at(row - 1);
      write_word(word, key < 0 || key != before, key < 0);
    }
  }
  if (warp != kSoftmaxTileWarps - 1) return;
  const int64_t end_row = first_row + a.own_rows;
  const int64_t row = lane == 0   ? first_row - 1
                      : lane == 1 ? first_row
                      : lane == 2 ? first_row - a.own_rows - 1
                      : lane == 3 ? first_row - a.own_rows + a.tile_rows
                      : lane == 4 ? end_row - 1
                      : lane == 5 ? end_row
                      : lane == 6 ? first_row + a.tile_rows
                                  : -1;
  const RunKey key = key_at(row);
  const auto key_of = [&](int from) { return __shfl_sync(kFullWarp, key, from); };
  const RunKey head = key_of(1), tail = key_of(4);
  // An entering run is long if it covers all own rows of the previous tile, or extends beyond what that tile reaches.
  const bool carries_in = key_of(0) == head && head >= 0 && (key_of(2) == head || key_of(3) == head);
  const bool is_covered = carries_in && head == tail;
  const bool is_cut = key_of(5) == tail && tail >= 0 && (key_of(6) == tail || is_covered);
  if (lane == 0) {
    shared.carries_in = carries_in;
    shared.is_cut = is_cut;
    shared.carries_out = is_cut && !is_covered;
    if (writes_carries) a.carries.in_segment[tile] = carries_in ? static_cast<uint32_t>(head) : kDropped;
  }
}

// Finds the rows that the block writes, and those that it leaves to LongRunsKernel. Called by one warp. `left_rows` are
// those of the tile, or nullptr.
template <int kRows>
__device__ __forceinline__ void FindOwnRows(int own_rows, int rows, SoftmaxTileShared<kRows>& shared,
                                            int32_t* left_rows) {
  const int lane = threadIdx.x % 32;
  int first = rows, last = -1, next = rows;
  for (int word = lane; word * 32 < rows; word += 32) {
    const uint32_t starts = shared.starts[word];
    const int left = own_rows - word * 32;
    const uint32_t in_own_rows = left >= 32 ? kFullWarp : left <= 0 ? 0 : (1u << left) - 1;
    if ((starts & in_own_rows) != 0) {
      first = min(first, word * 32 + __ffs(starts & in_own_rows) - 1);
      last = max(last, word * 32 + 31 - __clz(starts & in_own_rows));
    }
    if ((starts & ~in_own_rows) != 0) next = min(next, word * 32 + __ffs(starts & ~in_own_rows) - 1);
  }
  first = __reduce_min_sync(kFullWarp, first);
  last = __reduce_max_sync(kFullWarp, last);
  next = __reduce_min_sync(kFullWarp, next);
  if (lane != 0) return;
  shared.end = max(shared.is_cut ? last : next, 0);
  shared.begin = min(first, shared.end);
  if (left_rows != nullptr) {
    left_rows[0] = shared.carries_in ? min(first, own_rows) : 0;
    left_rows[1] = shared.carries_out ? own_rows - max(last, 0) : 0;
  }
}

template <int kVec, int kRows, typename T, bool kBackward>
__device__ __forceinline__ void StageTile(const SoftmaxTileArguments<T, kBackward>& a, int input, int64_t first_row,
                                          int rows, int64_t column, int row_lanes, T* staged) {
  const T* const source = a.inputs[input];
  if (a.is_flat) {
    const int features = static_cast<int>(a.features);
    const T* const first = source + first_row * features;
    const int elements = rows * features;
    constexpr int kWord = 16 / sizeof(T), kWords = kRows * kVec / kWord, kStep = kSoftmaxTileThreads * kWord;
    const T* const from = first + threadIdx.x * kWord;
    T* const to = staged + threadIdx.x * kWord;
    if (kRows * kVec % kWord == 0 && elements == kWords * kStep) {
#pragma unroll
      for (int u = 0; u < kWords; ++u) __pipeline_memcpy_async(to + u * kStep, from + u * kStep, 16);
      return;
    }
    for (int i = threadIdx.x * kWord; i + kWord <= elements; i += kStep) {
      __pipeline_memcpy_async(staged + i, first + i, 16);
    }
    const int i = elements / kWord * kWord + threadIdx.x;
    if (i < elements) staged[i] = first[i];
  } else {
    const int lanes = a.lanes.lanes, lane = threadIdx.x % lanes, groups = kSoftmaxTileThreads / lanes;
    const int group = threadIdx.x / lanes;
    if (lane >= row_lanes || group >= groups) return;
#pragma unroll 4
    for (int row = group; row < rows; row += groups) {
      const T* const from =
          source + a.rows.Place(first_row + row, a.is_shared[input]) * a.features + column + lane * kVec;
      T* const to = staged + (row * lanes + lane) * kVec;
      if constexpr (sizeof(T) * kVec >= 4) {
        __pipeline_memcpy_async(to, from, sizeof(T) * kVec);
      } else {
        StoreShared(to, LoadStreaming<kVec>(from));
      }
    }
  }
}

template <typename T, int kVec, bool kBackward>
__global__ void __launch_bounds__(kSoftmaxTileThreads, sizeof(T) == 8 ? kSoftmaxTileBlocks / 2 : kSoftmaxTileBlocks)
    SoftmaxTileKernel(const __grid_constant__ SoftmaxTileArguments<T, kBackward> a) {
  using C = ComputeType<T>;
  constexpr int kRows = ThreadRows(kVec, sizeof(T), kBackward), kStates = kBackward ? 1 : 2;
  extern __shared__ uint4 staged_memory[];
  __shared__ SoftmaxTileShared<kRows> shared;
  __shared__ WarpTails<C, kVec> tails[kStates];

  if (blockIdx.x == 0 && threadIdx.x == 0) *a.counters = {};
  const int lanes = a.lanes.lanes;
  const uint32_t tile_of_block = a.lanes.columns == 1 ? blockIdx.x : blockIdx.x / a.lanes.columns;
  const int column_block = static_cast<int>(blockIdx.x - tile_of_block * a.lanes.columns);
  const int64_t tile = tile_of_block;
  const int64_t column = static_cast<int64_t>(column_block) * lanes * kVec;
  const int row_lanes =
      a.lanes.columns == 1 ? lanes : static_cast<int>(min(static_cast<int64_t>(lanes), (a.features - column) / kVec));
  const int64_t first_row = tile * a.own_rows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(a.tile_rows), a.rows.count - first_row));

  const int tile_elements = a.tile_rows * lanes * kVec;
  C* const table = reinterpret_cast<C*>(staged_memory);  // one total per run, at its first row in the tile
  T* const staged = reinterpret_cast<T*>(table + tile_elements);
  T* const staged_d = staged + tile_elements;
  const auto stage = [&](int input, T* target) {
    StageTile<kVec, kRows>(a, input, first_row, rows, column, row_lanes, target);
    __pipeline_commit();
  };
  stage(0, staged);
  if (kBackward) stage(1, staged_d);
  ReadTile(a, tile, column_block == 0, shared);
  __pipeline_wait_prior(0);
  __syncthreads();

  ThreadRuns runs;
  runs.lanes = lanes;
  runs.lane = threadIdx.x % 32;
  runs.warp = threadIdx.x / 32;
  const int warp_groups = static_cast<int>(32 * a.lanes_inverse >> 16);
  // Left-over lanes are assigned to the first group, but read and write none of its rows.
  runs.is_left_over = runs.lane >= warp_groups * lanes;
  const int group = runs.is_left_over ? 0 : static_cast<int>(runs.lane * a.lanes_inverse >> 16);
  runs.row_lane = runs.lane - (runs.is_left_over ? warp_groups : group) * lanes;
  runs.last_lane = (warp_groups - 1) * lanes;
  runs.first_row = (runs.warp * warp_groups + group) * kRows;
  runs.starts = RowBits<kRows>(shared.starts, runs.first_row);
  if (runs.first_row == a.own_rows && shared.is_cut) runs.starts |= 1;
  if (runs.is_left_over) runs.starts = 0;
  runs.groups_with_start = __ballot_sync(kFullWarp, runs.row_lane == 0 && runs.HasStart());
  const int own_lane = group * lanes;
  const uint32_t up_to_own = runs.groups_with_start & ((2u << own_lane) - 1);
  runs.reach = up_to_own == 0 ? own_lane : own_lane - (31 - __clz(up_to_own));
  runs.head_start = LastStart(shared.starts, runs.first_row);
  if (runs.first_row > a.own_rows && shared.is_cut) runs.head_start = max(runs.head_start, a.own_rows);
  if (runs.lane == 0) shared.warp_has_start[runs.warp] = runs.groups_with_start != 0;

  T* const own = staged + (runs.first_row * lanes + runs.row_lane) * kVec;
  T* const own_d = staged_d + (runs.first_row * lanes + runs.row_lane) * kVec;
  const int row_step = lanes * kVec;
  const bool is_active = !runs.is_left_over && runs.row_lane < row_lanes;
  const uint32_t without_value = is_active ? RowBits<kRows>(shared.dropped, runs.first_row) : (1u << kRows) - 1;
  C* const own_table = table + runs.row_lane * kVec;
  const auto load_row = [&](const T* rows_of_thread, int k) {
    return runs.is_left_over ? Repeat<kVec>(static_cast<T>(C{0})) : LoadVector<kVec>(rows_of_thread + k * row_step);
  };
  // Calls store(carry) for the carries that the run's state belongs to.
  const auto for_carries = [&](int run_start, auto&& store) {
    if (!is_active) return;
    using Carry = typename SoftmaxReduction<T, kBackward>::template Accumulator<kVec>;
    const int64_t vector = (tile * a.features + column) / kVec + runs.row_lane;
    if (run_start == 0 && shared.carries_in) store(static_cast<Carry*>(a.carries.in)[vector]);
    if (runs.first_row == a.own_rows && shared.carries_out && run_start == runs.head_start) {
      store(static_cast<Carry*>(a.carries.out)[vector]);
    }
  };
  const auto add = [](C x, C y) { return x + y; };
  // Calls body(k, total) with the `table` entry of the run of each of the thread's rows.
  const auto for_each_row = [&](auto&& body) {
    const C* const first_cells = own_table + runs.first_row * row_step;
    const C* run_cells = own_table + runs.head_start * row_step;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      run_cells = ((runs.starts >> k) & 1) != 0 ? first_cells + k * row_step : run_cells;
      body(k, LoadVector<kVec>(run_cells));
    }
  };
  // Sets dropped rows to 0, in the result, and in the input so that their sums are in range.
  const auto clear_rows = [&] {
    if (runs.is_left_over) return;
#pragma unroll 1
    for (uint32_t left = without_value; left != 0; left &= left - 1) {
      StoreShared(own + (__ffs(left) - 1) * row_step, Repeat<kVec>(static_cast<T>(C{0})));
    }
  };
  const auto store_result = [&](int k, const Vector<C, kVec>& value) {
    Vector<T, kVec> result;
#pragma unroll
    for (int i = 0; i < kVec; ++i) result.lane[i] = static_cast<T>(value.lane[i]);
    if (!runs.is_left_over) StoreShared(own + k * row_step, result);
  };
  Vector<C, kVec> values[kRows];
  if (runs.warp == kSoftmaxTileWarps - 1) {
    FindOwnRows(a.own_rows, rows, shared, column_block == 0 ? a.left_rows + 2 * tile : nullptr);
  }
  if constexpr (kBackward) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const Vector<T, kVec> p = load_row(own, k), d_p = load_row(own_d, k);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[k].lane[i] = static_cast<C>(p.lane[i]) * static_cast<C>(d_p.lane[i]);
    }
    TotalRuns(runs, values, C{0}, own_table, row_step, tails[0], shared.warp_has_start, add,
              [&](int run_start, const Vector<C, kVec>& total) {
                for_carries(run_start, [&](auto& carry) { memcpy(carry.sum, total.lane, sizeof(carry.sum)); });
              });
    for_each_row([&](int k, const Vector<C, kVec>& sum) {
      const Vector<T, kVec> p = load_row(own, k), d_p = load_row(own_d, k);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        values[k].lane[i] = SoftmaxGradient(static_cast<C>(p.lane[i]), static_cast<C>(d_p.lane[i]), sum.lane[i]);
      }
      store_result(k, values[k]);
    });
  } else {
    clear_rows();
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const Vector<T, kVec> x = load_row(own, k);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[k].lane[i] = ScaledExp(static_cast<C>(x.lane[i]));
    }
    const auto store_scaled_carry = [&](int run_start, const Vector<C, kVec>& total) {
      for_carries(run_start, [&](auto& carry) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          carry.maximum[i] = C{0};  // as if it were
          carry.sum[i] = UnscaledExpSum(total.lane[i]);
        }
      });
    };
    TotalRuns(runs, values, C{0}, own_table, row_step, tails[0], shared.warp_has_start, add, store_scaled_carry);
    RangeCheck<C> check;
    for_each_row([&](int k, const Vector<C, kVec>& sum) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        check.Add(sum.lane[i]);
        values[k].lane[i] = AtMostOne(values[k].lane[i] * Reciprocal(sum.lane[i]));
      }
      store_result(k, values[k]);
    });
    if (__syncthreads_or(!check.AllInRange())) {
      // Recomputes the tile with maxima.
      stage(0, staged);
      __pipeline_wait_prior(0);
      __syncthreads();
      clear_rows();
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const Vector<T, kVec> x = load_row(own, k);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[k].lane[i] = static_cast<C>(x.lane[i]);
      }
      TotalRuns(
          runs, values, -std::numeric_limits<C>::infinity(), own_table, row_step, tails[0], shared.warp_has_start,
          [](C x, C y) { return HardwareLarger(x, y); },
          [&](int run_start, const Vector<C, kVec>& maximum) {
            for_carries(run_start, [&](auto& carry) { memcpy(carry.maximum, maximum.lane, sizeof(carry.maximum)); });
          });
      for_each_row([&](int k, const Vector<C, kVec>& maximum) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[k].lane[i] = exp(values[k].lane[i] - maximum.lane[i]);
      });
      __syncthreads();
      TotalRuns(runs, values, C{0}, own_table, row_step, tails[1], shared.warp_has_start, add,
                [&](int run_start, const Vector<C, kVec>& sum) {
                  for_carries(run_start, [&](auto& carry) {
        // If all rows are -inf, the sum of the tile is NaN.
#pragma unroll
                    for (int i = 0; i < kVec; ++i) {
                      const bool is_lowest = carry.maximum[i] == -std::numeric_limits<C>::infinity();
                      carry.sum[i] = is_lowest ? C{0} : sum.lane[i];
                    }
                  });
                });
      for_each_row([&](int k, const Vector<C, kVec>& sum) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[k].lane[i] = AtMostOne(values[k].lane[i] * Reciprocal(sum.lane[i]));
        store_result(k, values[k]);
      });
      __syncthreads();
    }
  }
  clear_rows();
  __syncthreads();

  const int begin = shared.begin, end = shared.end;
  if (a.is_flat) {
    // Stores whole 16-byte words, and single elements at both ends.
    constexpr int kWord = 16 / sizeof(T);
    const int features = static_cast<int>(a.features);
    const int first = begin * features, last = end * features;
    const int first_word = (first + kWord - 1) / kWord * kWord, last_word = last / kWord * kWord;
    T* const output = a.output + first_row * features;
    const uint32_t own_first = threadIdx.x * kWord - first_word, count = max(last_word - first_word, 0);
    T* const to = output + threadIdx.x * kWord;
    const T* const from = staged + threadIdx.x * kWord;
#pragma unroll
    for (int u = 0; u < (kRows * kVec + kWord - 1) / kWord; ++u) {
      constexpr int kStep = kSoftmaxTileThreads * kWord;
      if (own_first + u * kStep < count) StoreStreaming(to + u * kStep, LoadVector<kWord>(from + u * kStep));
    }
    const int at_end = max(last_word, first_word) + static_cast<int>(threadIdx.x);
    const int at_begin = first + static_cast<int>(threadIdx.x);
    if (at_begin < min(first_word, last)) output[at_begin] = staged[at_begin];
    if (at_end < last) output[at_end] = staged[at_end];
  } else {
    const int lane = threadIdx.x % lanes, groups = kSoftmaxTileThreads / lanes, group_of_block = threadIdx.x / lanes;
    if (lane >= row_lanes || group_of_block >= groups) return;
#pragma unroll 4
    for (int row = begin + group_of_block; row < end; row += groups) {
      T* const to = a.output + a.rows.Place(first_row + row) * a.features + column + lane * kVec;
      StoreStreaming(to, LoadVector<kVec>(staged + (row * lanes + lane) * kVec));
    }
  }
}

}  // namespace jax_baracuda::segment
