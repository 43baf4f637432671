// Segment maximum of rows in any order, through a table of the cells that takes atomic maxima.
//
// Values become unsigned integers of the same order, for which the hardware has an atomic maximum: NaN of either sign
// the greatest, -0 below +0, and 0 for the maximum of nothing. A plain load comes before each atomic, because few rows
// raise a maximum. Where the table fits in shared memory each block keeps its own and merges it once.
#pragma once

#include "ffi/segment/segment_max_device.cuh"

namespace jax_baracuda::segment {

template <typename T>
using TableKey = std::conditional_t<sizeof(T) == 8, unsigned long long, unsigned int>;

template <typename T>
__device__ __forceinline__ TableKey<T> EncodeKey(T value) {
  using Key = TableKey<T>;
  constexpr Key kSign = Key{1} << (8 * sizeof(Key) - 1);
  if constexpr (kIsFloating<T>) {
    const ComputeType<T> x = static_cast<ComputeType<T>>(value);
    Key bits;
    memcpy(&bits, &x, sizeof(bits));
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
    ComputeType<T> x;
    memcpy(&x, &bits, sizeof(x));
    return static_cast<T>(x);
  } else {
    return static_cast<T>(key + static_cast<Key>(std::numeric_limits<T>::lowest()));
  }
}

template <typename T>
struct TableArguments {
  const T* data;
  SegmentIds ids;
  Problem problem;
  bool first_wins;
  TableKey<T>* table;  // [batch, segments, features]; for the winners' pass, not used
  T* output;
  int32_t* winner;
  int64_t blocks_per_batch;
};

// Calls body(values, cells, rows) for each vector of the block's share of one element of the batch; a cell is counted
// from the element's first one, and is negative where the row is dropped. Vectors run across the ends of rows.
template <typename T, int kVec, typename Body>
__device__ __forceinline__ void ForEachVector(const TableArguments<T>& a, int64_t b, Body&& body) {
  const int64_t features = a.problem.features;
  const int64_t elements = a.problem.rows * features;
  const T* data = a.data + (a.problem.data_is_shared ? 0 : b * elements);
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
  const int64_t block = blockIdx.x - b * a.blocks_per_batch;
  const int64_t first = (block * blockDim.x + threadIdx.x) * kVec;
  const int64_t stride = a.blocks_per_batch * blockDim.x * kVec;
  const int64_t stride_rows = stride / features, stride_features = stride - stride_rows * features;
  int64_t row = first / features, feature = first - row * features;

  for (int64_t element = first; element < elements; element += stride) {
    Vector<T, kVec> values;
    int64_t cells[kVec];
    int32_t rows[kVec];
    const bool is_whole = element + kVec <= elements;
    if (is_whole) {
      values = LoadStreaming<T, kVec>(data + element);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) values.lane[i] = data[element + i < elements ? element + i : elements - 1];
    }
    int64_t r = row, f = feature;
    uint32_t segment = a.ids[ids_offset + r];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const bool exists = is_whole || element + i < elements;
      cells[i] = exists && segment != kDropped ? segment * features + f : -1;
      rows[i] = static_cast<int32_t>(r);
      if (i + 1 < kVec && ++f == features) {
        f = 0;
        ++r;
        if (is_whole || element + i + 1 < elements) segment = a.ids[ids_offset + r];
      }
    }
    body(values, cells, rows);
    row += stride_rows;
    feature += stride_features;
    if (feature >= features) {
      feature -= features;
      ++row;
    }
  }
}

template <typename Key>
__device__ __forceinline__ void RaiseTo(Key* cell, Key current, Key key) {
  if (key > current) atomicMax(cell, key);
}

template <typename T, int kVec>
__global__ void __launch_bounds__(256) TableMaxKernel(const __grid_constant__ TableArguments<T> a) {
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  TableKey<T>* table = a.table + b * a.problem.segments * a.problem.features;
  ForEachVector<T, kVec>(a, b, [&](const auto& values, const auto& cells, const auto&) {
    TableKey<T> current[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) current[i] = cells[i] < 0 ? ~TableKey<T>{0} : __ldcg(table + cells[i]);
#pragma unroll
    for (int i = 0; i < kVec; ++i) RaiseTo(table + cells[i], current[i], EncodeKey(values.lane[i]));
  });
}

inline constexpr int kSharedTableThreads = 512;

template <typename T, int kVec>
__global__ void __launch_bounds__(kSharedTableThreads)
    SharedTableMaxKernel(const __grid_constant__ TableArguments<T> a) {
  extern __shared__ unsigned long long shared_table_memory[];
  TableKey<T>* shared_table = reinterpret_cast<TableKey<T>*>(shared_table_memory);
  const int cell_count = static_cast<int>(a.problem.segments * a.problem.features);
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  TableKey<T>* table = a.table + b * cell_count;

  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) shared_table[i] = 0;
  __syncthreads();
  ForEachVector<T, kVec>(a, b, [&](const auto& values, const auto& cells, const auto&) {
    TableKey<T> current[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) current[i] = cells[i] < 0 ? ~TableKey<T>{0} : shared_table[cells[i]];
#pragma unroll
    for (int i = 0; i < kVec; ++i) RaiseTo(shared_table + cells[i], current[i], EncodeKey(values.lane[i]));
  });
  __syncthreads();
  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) RaiseTo(table + i, __ldcg(table + i), shared_table[i]);
}

// `table` may be `output` itself where the two have elements of one size.
template <typename T>
__global__ void __launch_bounds__(256) DecodeTableKernel(const TableKey<T>* table, int64_t cells, T* output) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < cells) output[i] = DecodeKey<T>(table[i]);
}

// Counts `count` more rows that attain the maximum of a cell into its winner; `row` matters if there is one only.
__device__ __forceinline__ void AddTies(int32_t* winner, int32_t row, int32_t count, bool best_is_identity,
                                        bool first_wins) {
  if (first_wins) {
    // kNoWinner is the greatest unsigned number.
    atomicMin(reinterpret_cast<unsigned int*>(winner), static_cast<unsigned int>(row));
    return;
  }
  int32_t seen = *static_cast<volatile int32_t*>(winner);
  // Once a winner is a count it stays one, and the identity makes it one from the start.
  while (seen >= kNoWinner && !best_is_identity) {
    const int32_t counted = seen == kNoWinner ? (count == 1 ? row : -count) : -1 - count;
    const int32_t found = atomicCAS(winner, seen, counted);
    if (found == seen) return;
    seen = found;
  }
  atomicSub(winner, count);
}

// The winners of a finished output, in a pass of its own; `winner` is kNoWinner everywhere before.
template <typename T, int kVec>
__global__ void __launch_bounds__(256) TableWinnerKernel(const __grid_constant__ TableArguments<T> a) {
  using C = ComputeType<T>;
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const int64_t offset = b * a.problem.segments * a.problem.features;
  const T* output = a.output + offset;
  int32_t* winner = a.winner + offset;
  ForEachVector<T, kVec>(a, b, [&](const auto& values, const auto& cells, const auto& rows) {
    T best[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) best[i] = cells[i] < 0 ? T{} : __ldg(output + cells[i]);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const C value = static_cast<C>(values.lane[i]);
      if (cells[i] >= 0 && value == static_cast<C>(best[i])) {
        AddTies(winner + cells[i], rows[i], 1, value == static_cast<C>(MaxIdentity<T>()), a.first_wins);
      }
    }
  });
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kSharedTableThreads)
    SharedTableWinnerKernel(const __grid_constant__ TableArguments<T> a) {
  using C = ComputeType<T>;
  extern __shared__ unsigned long long shared_table_memory[];
  const int cell_count = static_cast<int>(a.problem.segments * a.problem.features);
  C* shared_best = reinterpret_cast<C*>(shared_table_memory);
  int32_t* shared_winner = reinterpret_cast<int32_t*>(shared_best + cell_count);
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const T* output = a.output + b * cell_count;
  int32_t* winner = a.winner + b * cell_count;
  const C identity = static_cast<C>(MaxIdentity<T>());

  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) {
    shared_best[i] = static_cast<C>(output[i]);
    shared_winner[i] = kNoWinner;
  }
  __syncthreads();
  ForEachVector<T, kVec>(a, b, [&](const auto& values, const auto& cells, const auto& rows) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (cells[i] >= 0 && static_cast<C>(values.lane[i]) == shared_best[cells[i]]) {
        AddTies(shared_winner + cells[i], rows[i], 1, false, a.first_wins);
      }
    }
  });
  __syncthreads();
  for (int i = threadIdx.x; i < cell_count; i += blockDim.x) {
    const int32_t found = shared_winner[i];
    if (found != kNoWinner) AddTies(winner + i, found, TieCount(found), shared_best[i] == identity, a.first_wins);
  }
}

}  // namespace jax_baracuda::segment
