// Segment maximum of rows in any order, by atomic maxima on a table of the cells. For a minimum, values are flipped
// when read and written.
//
// A table holds keys (see EncodeKey), for which the hardware has an atomic maximum. Values of 32 and 64 bits need no keys
// in global memory: the output is the table. Of many rows, few raise a maximum, so a plain load precedes each atomic. If
// the table fits in shared memory, each block keeps its own and merges it once, or writes the results if it is the only
// block of its batch element. If the table exceeds the L1 cache and there are many rows per cell, lower bounds in shared
// memory avoid most of those loads.
#pragma once

#include "ffi/core/launch_bounds.cuh"
#include "ffi/core/warp.cuh"
#include "ffi/segment/engine/unordered_rows.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

template <typename T>
__device__ __forceinline__ T DecodeKey(OrderedKey<T> key) {
  using Key = OrderedKey<T>;
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
  OrderedKey<T>* keys;  // [batch, segments, features], if the table holds keys
  T* output;
  int32_t* winner;
};

// The result of a finished cell.
template <typename T>
__device__ __forceinline__ T ResultOf(const TableArguments<T>& a, OrderedKey<T> key) {
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

// The cells of a batch element, as keys or as values. Values are stored as in the output: those of a minimum fall.
template <typename T, bool kHoldsValues>
struct Table {
  using Cell = std::conditional_t<kHoldsValues, T, OrderedKey<T>>;

  Cell* cells;
  FlipWord<T> flip;

  __device__ __forceinline__ OrderedKey<T> KeyOf(Cell cell) const {
    if constexpr (kHoldsValues) {
      return EncodeKey(Flip(cell, static_cast<BitsOf<T>>(flip)));
    } else {
      return cell;
    }
  }

  __device__ __forceinline__ void Raise(int64_t i, T flipped_value) const {
    if constexpr (kHoldsValues) {
      RaiseValue(cells + i, flipped_value);
    } else {
      atomicMax(cells + i, EncodeKey(flipped_value));
    }
  }

 private:
  // The atomics are those of integers, which order floating numbers of one sign: negative ones in reverse, and as signed
  // integers below those without a sign bit.
  __device__ __forceinline__ void RaiseValue(T* cell, T value) const {
    using Unsigned = OrderedKey<T>;
    using Signed = std::conditional_t<sizeof(T) == 8, long long, int>;
    constexpr Unsigned kSign = Unsigned{1} << (8 * sizeof(T) - 1);
    if constexpr (kIsFloating<T>) value = value == value ? value : std::numeric_limits<T>::quiet_NaN();
    const Unsigned bits = BitCast<Unsigned>(value), stored = bits ^ static_cast<Unsigned>(flip);
    const bool falls = kIsFloating<T> ? (bits & kSign) != 0 : (flip & 1) != 0;
    const bool is_signed = ((flip & kSign) != 0) == falls;
    Unsigned* const unsigned_cell = reinterpret_cast<Unsigned*>(cell);
    Signed* const signed_cell = reinterpret_cast<Signed*>(cell);
    if (falls) {
      is_signed ? atomicMin(signed_cell, static_cast<Signed>(stored)) : atomicMin(unsigned_cell, stored);
    } else {
      is_signed ? atomicMax(signed_cell, static_cast<Signed>(stored)) : atomicMax(unsigned_cell, stored);
    }
  }
};

// Whether the output is the table in global memory.
template <typename T>
inline constexpr bool kOutputIsTable = sizeof(OrderedKey<T>) == sizeof(T);
template <typename T>
using GlobalTable = Table<T, kOutputIsTable<T>>;
template <typename T>
using SharedTable = Table<T, false>;

template <typename T>
JB_HOST_DEVICE GlobalTable<T> GlobalTableOf(const TableArguments<T>& a, int64_t b) {
  const int64_t first = b * a.problem.segments * a.problem.features;
  if constexpr (kOutputIsTable<T>) {
    return {a.output + first, a.flip};
  } else {
    return {a.keys + first, a.flip};
  }
}

// Raises cells to the values. The plain load may be stale, which is safe because cells only rise.
template <typename T, bool kHoldsValues, typename Found>
__device__ __forceinline__ void RaiseCells(const Table<T, kHoldsValues>& table, const Found& elements) {
  constexpr int kVec = sizeof(elements.values) / sizeof(T);
  const auto current = elements.Gather(table.cells);
  bool raises[kVec], raises_any = false;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    raises[i] = EncodeKey(elements.values.lane[i]) > table.KeyOf(current.lane[i]);
    raises_any |= raises[i];
  }
  if (!raises_any) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (raises[i] && !elements.IsDropped(i)) table.Raise(elements.Cell(i), elements.values.lane[i]);
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(256) TableMaxKernel(const __grid_constant__ TableArguments<T> a) {
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const GlobalTable<T> table = GlobalTableOf(a, b);
  ForEachFlipped<int64_t, kVec>(a, b, [&](const auto& elements) { RaiseCells(table, elements); });
}

// For few elements. Most of them are read before any cell has risen, so a load would save no atomic. Neighbouring
// threads raise neighbouring cells, which is one access to memory.
template <typename T>
__global__ void __launch_bounds__(256) RaiseTableKernel(const __grid_constant__ TableArguments<T> a) {
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const GlobalTable<T> table = GlobalTableOf(a, b);
  ForEachFlipped<int64_t, 1>(a, b, [&](const auto& elements) {
    if (!elements.IsDropped(0)) table.Raise(elements.Cell(0), elements.values.lane[0]);
  });
}

// Each group of neighbouring cells has a lower bound. An element that is not above the bound of its group need not read
// the table. After a fraction of the rows, this holds for most elements.
inline constexpr int kBoundBytes = 48 * 1024;
inline constexpr int kFilterThreads = 384;
inline constexpr int kFilterBlocks = 4;  // minimum resident blocks per multiprocessor
inline constexpr int kBoundLanes = 8;    // threads that compute the bound of one group

// The upper 16 bits of a floating key, which are still a lower bound. Keys of 1- and 2-byte integers fit in 16 bits;
// those of 4-byte integers are stored whole.
template <typename T>
using BoundKey = std::conditional_t<kIsFloating<T> || sizeof(T) < 4, uint16_t, uint32_t>;

template <typename T>
inline constexpr int kBoundShift = kIsFloating<T> ? 16 : 0;

template <typename T>
struct LowerBounds {
  static constexpr int kGroups = kBoundBytes / sizeof(BoundKey<T>);

  BoundKey<T>* keys;
  uint32_t cells;
  uint32_t groups_per_cell;  // fixed point, times 2^32

  LowerBounds(BoundKey<T>* bound_keys, int64_t cell_count)
      : keys(bound_keys),
        cells(static_cast<uint32_t>(cell_count)),
        groups_per_cell(static_cast<uint32_t>((int64_t{kGroups} << 32) / cell_count)) {}

  __device__ __forceinline__ uint32_t Group(uint32_t cell) const { return __umulhi(cell, groups_per_cell); }
  __device__ __forceinline__ uint32_t FirstCell(uint32_t group) const {
    const uint64_t first = ((static_cast<uint64_t>(group) << 32) + groups_per_cell - 1) / groups_per_cell;
    return static_cast<uint32_t>(min(first, static_cast<uint64_t>(cells)));
  }
};

template <typename T>
__global__ void __launch_bounds__(256)
    LowerBoundsKernel(const GlobalTable<T> table, const LowerBounds<T> lower_bounds) {
  using Key = OrderedKey<T>;
  static_assert(LowerBounds<T>::kGroups * kBoundLanes % 256 == 0);
  const uint32_t group = (blockIdx.x * 256 + threadIdx.x) / kBoundLanes;
  const uint32_t end = lower_bounds.FirstCell(group + 1);
  Key least = ~Key{0};
#pragma unroll 4
  for (uint32_t cell = lower_bounds.FirstCell(group) + threadIdx.x % kBoundLanes; cell < end; cell += kBoundLanes) {
    least = min(least, table.KeyOf(table.cells[cell]));
  }
#pragma unroll
  for (int step = 1; step < kBoundLanes; step *= 2) least = min(least, __shfl_xor_sync(kFullWarp, least, step));
  if (threadIdx.x % kBoundLanes == 0) lower_bounds.keys[group] = static_cast<BoundKey<T>>(least >> kBoundShift<T>);
}

// TableMaxKernel with lower bounds, for a batch of one. An element that equals its bound cannot raise its cell.
template <typename T, int kVec>
__global__ void __launch_bounds__(kFilterThreads, MinBlocks(kFilterThreads, kFilterBlocks))
    FilteredMaxKernel(const __grid_constant__ TableArguments<T> a, const LowerBounds<T> lower_bounds) {
  using Key = OrderedKey<T>;
  constexpr int kWords = kBoundBytes / sizeof(uint4);
  __shared__ uint4 bound_words[kWords];
  for (int i = threadIdx.x; i < kWords; i += kFilterThreads) {
    bound_words[i] = reinterpret_cast<const uint4*>(lower_bounds.keys)[i];
  }
  __syncthreads();
  const BoundKey<T>* bound_keys = reinterpret_cast<const BoundKey<T>*>(bound_words);
  const GlobalTable<T> table = GlobalTableOf(a, 0);

  ForEachFlipped<int32_t, kVec>(a, 0, [&](auto elements) {
    constexpr bool kInOneRow = sizeof(elements.first_cell) == sizeof(int32_t);
    bool is_any_above = false;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (elements.IsDropped(i)) continue;
      const Key bound = static_cast<Key>(bound_keys[lower_bounds.Group(elements.Cell(i))]) << kBoundShift<T>;
      if (EncodeKey(elements.values.lane[i]) > bound) {
        is_any_above = true;
      } else if (!kInOneRow) {
        elements.first_cell[kInOneRow ? 0 : i] = -1;
      }
    }
    if (is_any_above) RaiseCells(table, elements);
  });
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kSharedTableThreads, MinBlocks(kSharedTableThreads, kSharedTableBlocks))
    SharedTableMaxKernel(const __grid_constant__ TableArguments<T> a) {
  extern __shared__ uint4 shared_table_memory[];
  OrderedKey<T>* const keys = reinterpret_cast<OrderedKey<T>*>(shared_table_memory);
  const int cell_count = static_cast<int>(a.problem.segments * a.problem.features);
  const int64_t b = blockIdx.x / a.blocks_per_batch;

  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) keys[i] = 0;
  __syncthreads();
  const SharedTable<T> shared_table{keys, a.flip};
  ForEachFlipped<int32_t, kVec>(a, b, [&](const auto& elements) { RaiseCells(shared_table, elements); });
  __syncthreads();
  if (a.blocks_per_batch == 1) {
    T* const output = a.output + b * cell_count;
    for (int i = threadIdx.x; i < cell_count; i += blockDim.x) output[i] = ResultOf(a, keys[i]);
    return;
  }
  const GlobalTable<T> table = GlobalTableOf(a, b);
  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) {
    if (keys[i] > table.KeyOf(table.cells[i])) table.Raise(i, DecodeKey<T>(keys[i]));
  }
}

inline constexpr int kDecodedCells = 4;  // per thread

// Writes the results of narrow values.
template <typename T>
__global__ void __launch_bounds__(256) DecodeTableKernel(const __grid_constant__ TableArguments<T> a, int64_t cells) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kDecodedCells;
  if (first + kDecodedCells <= cells) {
    const auto keys = LoadStreaming<kDecodedCells>(a.keys + first);
    Vector<T, kDecodedCells> results;
#pragma unroll
    for (int i = 0; i < kDecodedCells; ++i) results.lane[i] = ResultOf(a, keys.lane[i]);
    StoreVector(a.output + first, results);
  } else {
    for (int64_t i = first; i < cells; ++i) a.output[i] = ResultOf(a, a.keys[i]);
  }
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
