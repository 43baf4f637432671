// Segment maximum of rows in any order, by atomic maxima on a table of the cells. For a minimum, values are flipped
// when read and written.
//
// Values become unsigned integers of the same order, for which the hardware has an atomic maximum: NaN of either sign
// is the greatest, -0 is below +0, and 0 is the maximum of no rows. A plain load precedes each atomic, because few rows
// raise a maximum. If the table fits in shared memory, each block keeps its own and merges it once, or writes the
// results if it is the only block of its batch element. If the table exceeds the L1 cache and there are many rows per
// cell, lower bounds in shared memory avoid most of those loads.
#pragma once

#include "ffi/core/launch_bounds.cuh"
#include "ffi/core/warp.cuh"
#include "ffi/segment/engine/unordered_rows.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

template <typename T>
using TableKey = std::conditional_t<sizeof(T) == 8, unsigned long long, unsigned int>;

template <typename T>
__device__ __forceinline__ TableKey<T> EncodeKey(T value) {
  using Key = TableKey<T>;
  constexpr Key kSign = Key{1} << (8 * sizeof(Key) - 1);
  if constexpr (kIsFloating<T>) {
    const ComputeType<T> x = static_cast<ComputeType<T>>(value);
    const Key bits = BitCast<Key>(x);
    return x != x ? ~Key{0} : ((bits & kSign) != 0 ? ~bits : bits | kSign);
  } else {
    return static_cast<Key>(value) - static_cast<Key>(std::numeric_limits<T>::lowest());
  }
}

template <typename T>
__device__ __forceinline__ T DecodeKey(TableKey<T> key) {
  using Key = TableKey<T>;
  if constexpr (kIsFloating<T>) {
    constexpr Key kSign = Key{1} << (8 * sizeof(Key) - 1);
    if (key < EncodeKey(MaxIdentity<T>())) return MaxIdentity<T>();
    const Key bits = (key & kSign) != 0 ? key & ~kSign : ~key;
    return static_cast<T>(BitCast<ComputeType<T>>(bits));
  } else {
    return static_cast<T>(key + static_cast<Key>(std::numeric_limits<T>::lowest()));
  }
}

template <typename T>
struct TableArguments : UnorderedRows<T> {
  bool first_wins;
  FlipWord<T> flip;
  TableKey<T>* table;  // [batch, segments, features]; unused by the winners' pass, and if a batch element has one block
  T* output;
  int32_t* winner;
};

// The result of a finished cell.
template <typename T>
__device__ __forceinline__ T ResultOf(const TableArguments<T>& a, TableKey<T> key) {
  return Flip(DecodeKey<T>(key), static_cast<BitsOf<T>>(a.flip));
}

// ForEachElements of the flipped values.
template <typename Index, int kVec, typename T, typename Body>
__device__ __forceinline__ void ForEachFlipped(const TableArguments<T>& a, int64_t b, Body&& body) {
  ForEachElements<Index, kVec>(a, b, [&](auto elements) {
    elements.values = FlipAll(elements.values, a.flip);
    body(elements);
  });
}

// Raises cells of `table` to the values. The plain load may be stale, which is safe because cells only rise.
template <typename T, typename Found>
__device__ __forceinline__ void RaiseCells(TableKey<T>* table, const Found& elements) {
  constexpr int kVec = sizeof(elements.values) / sizeof(T);
  const Vector<TableKey<T>, kVec> current = elements.Gather(table);
  TableKey<T> keys[kVec];
  bool raises = false;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    keys[i] = EncodeKey(elements.values.lane[i]);
    raises |= keys[i] > current.lane[i];
  }
  if (!raises) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (keys[i] > current.lane[i] && !elements.IsDropped(i)) atomicMax(table + elements.Cell(i), keys[i]);
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(256) TableMaxKernel(const __grid_constant__ TableArguments<T> a) {
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  TableKey<T>* table = a.table + b * a.problem.segments * a.problem.features;
  ForEachFlipped<int64_t, kVec>(a, b, [&](const auto& elements) { RaiseCells<T>(table, elements); });
}

// A floor is the lower bound of a group of neighbouring cells. An element that is not above the floor of its group need
// not read the table. After a fraction of the rows, this holds for most elements.
inline constexpr int kFloorBytes = 48 * 1024;
inline constexpr int kFilterThreads = 384;
inline constexpr int kFilterBlocks = 4;  // minimum resident blocks per multiprocessor
inline constexpr int kFloorLanes = 8;    // threads that compute the floor of one group

// The upper 16 bits of a floating key, which are still a lower bound. Keys of 1- and 2-byte integers fit in 16 bits;
// those of 4-byte integers are stored whole.
template <typename T>
using FloorKey = std::conditional_t<kIsFloating<T> || sizeof(T) < 4, uint16_t, uint32_t>;

template <typename T>
inline constexpr int kFloorShift = kIsFloating<T> ? 16 : 0;

template <typename T>
struct Floors {
  static constexpr int kGroups = kFloorBytes / sizeof(FloorKey<T>);

  FloorKey<T>* keys;
  uint32_t cells;
  uint32_t groups_per_cell;  // fixed point, times 2^32

  Floors(FloorKey<T>* floor_keys, int64_t cell_count)
      : keys(floor_keys),
        cells(static_cast<uint32_t>(cell_count)),
        groups_per_cell(static_cast<uint32_t>((int64_t{kGroups} << 32) / cell_count)) {}

  __device__ __forceinline__ uint32_t Group(uint32_t cell) const { return __umulhi(cell, groups_per_cell); }
  __device__ __forceinline__ uint32_t FirstCell(uint32_t group) const {
    const uint64_t first = ((static_cast<uint64_t>(group) << 32) + groups_per_cell - 1) / groups_per_cell;
    return static_cast<uint32_t>(min(first, static_cast<uint64_t>(cells)));
  }
};

template <typename T>
__global__ void __launch_bounds__(256) FloorsKernel(const TableKey<T>* table, const Floors<T> floors) {
  using Key = TableKey<T>;
  static_assert(Floors<T>::kGroups * kFloorLanes % 256 == 0);
  const uint32_t group = (blockIdx.x * 256 + threadIdx.x) / kFloorLanes;
  const uint32_t end = floors.FirstCell(group + 1);
  Key least = ~Key{0};
#pragma unroll 4
  for (uint32_t cell = floors.FirstCell(group) + threadIdx.x % kFloorLanes; cell < end; cell += kFloorLanes) {
    least = min(least, table[cell]);
  }
#pragma unroll
  for (int step = 1; step < kFloorLanes; step *= 2) least = min(least, __shfl_xor_sync(kFullWarp, least, step));
  if (threadIdx.x % kFloorLanes == 0) floors.keys[group] = static_cast<FloorKey<T>>(least >> kFloorShift<T>);
}

// TableMaxKernel with floors, for a batch of one. An element that equals its floor cannot raise its cell.
template <typename T, int kVec>
__global__ void __launch_bounds__(kFilterThreads, MinBlocks(kFilterThreads, kFilterBlocks))
    FilteredMaxKernel(const __grid_constant__ TableArguments<T> a, const Floors<T> floors) {
  using Key = TableKey<T>;
  constexpr int kWords = kFloorBytes / sizeof(uint4);
  __shared__ uint4 floor_words[kWords];
  for (int i = threadIdx.x; i < kWords; i += kFilterThreads) {
    floor_words[i] = reinterpret_cast<const uint4*>(floors.keys)[i];
  }
  __syncthreads();
  const FloorKey<T>* floor_keys = reinterpret_cast<const FloorKey<T>*>(floor_words);

  ForEachFlipped<int32_t, kVec>(a, 0, [&](auto elements) {
    constexpr bool kInOneRow = sizeof(elements.first_cell) == sizeof(int32_t);
    bool is_any_above = false;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (elements.IsDropped(i)) continue;
      const Key floor = static_cast<Key>(floor_keys[floors.Group(elements.Cell(i))]) << kFloorShift<T>;
      if (EncodeKey(elements.values.lane[i]) > floor) {
        is_any_above = true;
      } else if (!kInOneRow) {
        elements.first_cell[kInOneRow ? 0 : i] = -1;
      }
    }
    if (is_any_above) RaiseCells<T>(a.table, elements);
  });
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kSharedTableThreads, MinBlocks(kSharedTableThreads, kSharedTableBlocks))
    SharedTableMaxKernel(const __grid_constant__ TableArguments<T> a) {
  extern __shared__ uint4 shared_table_memory[];
  TableKey<T>* shared_table = reinterpret_cast<TableKey<T>*>(shared_table_memory);
  const int cell_count = static_cast<int>(a.problem.segments * a.problem.features);
  const int64_t b = blockIdx.x / a.blocks_per_batch;

  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) shared_table[i] = 0;
  __syncthreads();
  ForEachFlipped<int32_t, kVec>(a, b, [&](const auto& elements) { RaiseCells<T>(shared_table, elements); });
  __syncthreads();
  if (a.blocks_per_batch == 1) {
    T* const output = a.output + b * cell_count;
    for (int i = threadIdx.x; i < cell_count; i += blockDim.x) output[i] = ResultOf(a, shared_table[i]);
    return;
  }
  TableKey<T>* const table = a.table + b * cell_count;
  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) {
    if (shared_table[i] > table[i]) atomicMax(table + i, shared_table[i]);
  }
}

// The table may be the output itself if their elements have the same size.
template <typename T>
__global__ void __launch_bounds__(256) DecodeTableKernel(const __grid_constant__ TableArguments<T> a, int64_t cells) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < cells) a.output[i] = ResultOf(a, a.table[i]);
}

// Adds `count` rows that attain the cell's maximum to its winner. `row` is used if count is 1 or with first_wins.
__device__ __forceinline__ void AddTies(int32_t* winner, int32_t row, int32_t count, bool best_is_identity,
                                        bool first_wins) {
  if (first_wins) {
    // kNoWinner is the greatest unsigned number.
    atomicMin(reinterpret_cast<unsigned int*>(winner), static_cast<unsigned int>(row));
    return;
  }
  int32_t seen = *static_cast<volatile int32_t*>(winner);
  // Once a winner is a count it stays one. If the maximum is the identity, it is a count from the start.
  while (seen >= kNoWinner && !best_is_identity) {
    const int32_t counted = seen == kNoWinner ? (count == 1 ? row : -count) : -1 - count;
    const int32_t found = atomicCAS(winner, seen, counted);
    if (found == seen) return;
    seen = found;
  }
  atomicSub(winner, count);
}

// Adds the elements that attain the maximum to `winner`. `best` holds the maxima, to be flipped by `flip`.
template <typename T, typename C, typename Found>
__device__ __forceinline__ void CountWinners(const C* best, FlipWord<C> flip, int32_t* winner, const Found& elements,
                                             bool first_wins) {
  constexpr int kVec = sizeof(elements.values) / sizeof(T);
  const Vector<C, kVec> maximum = FlipAll(elements.Gather(best), flip);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    using Compute = ComputeType<T>;
    const Compute value = static_cast<Compute>(elements.values.lane[i]);
    if (!elements.IsDropped(i) && value == static_cast<Compute>(maximum.lane[i])) {
      const bool best_is_identity = value == static_cast<Compute>(MaxIdentity<T>());
      AddTies(winner + elements.Cell(i), elements.Row(i), 1, best_is_identity, first_wins);
    }
  }
}

// Finds the winners of a finished output, in a second pass; `winner` must be kNoWinner everywhere.
template <typename T, int kVec>
__global__ void __launch_bounds__(256) TableWinnerKernel(const __grid_constant__ TableArguments<T> a) {
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const int64_t offset = b * a.problem.segments * a.problem.features;
  ForEachFlipped<int64_t, kVec>(a, b, [&](const auto& elements) {
    CountWinners<T>(a.output + offset, a.flip, a.winner + offset, elements, a.first_wins);
  });
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kSharedTableThreads, MinBlocks(kSharedTableThreads, kSharedTableBlocks))
    SharedTableWinnerKernel(const __grid_constant__ TableArguments<T> a) {
  using C = ComputeType<T>;
  extern __shared__ uint4 shared_table_memory[];
  const int cell_count = static_cast<int>(a.problem.segments * a.problem.features);
  C* shared_best = reinterpret_cast<C*>(shared_table_memory);
  int32_t* shared_winner = reinterpret_cast<int32_t*>(shared_best + cell_count);
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const T* output = a.output + b * cell_count;
  int32_t* winner = a.winner + b * cell_count;

  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) {
    shared_best[i] = static_cast<C>(Flip(output[i], static_cast<BitsOf<T>>(a.flip)));
    shared_winner[i] = kNoWinner;
  }
  __syncthreads();
  ForEachFlipped<int32_t, kVec>(a, b, [&](const auto& elements) {
    CountWinners<T>(shared_best, FlipWord<C>{0}, shared_winner, elements, a.first_wins);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) {
    const int32_t found = shared_winner[i];
    if (found == kNoWinner) continue;
    // If the identity is a member, the block's count includes it, and the count in global memory has it already.
    const bool best_is_identity = shared_best[i] == static_cast<C>(MaxIdentity<T>());
    AddTies(winner + i, found, TieCount(found) - (best_is_identity ? 1 : 0), best_is_identity, a.first_wins);
  }
}

}  // namespace jax_baracuda::segment
