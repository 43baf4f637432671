// Softmax and its gradient for rows in any order, by atomic additions to tables of the cells.
//
// Pass 1 sums exp(x), and pass 2 divides by the sums. Cells whose sum is out of range, or NaN, are recomputed: pass 2
// finds their maxima, pass 3 sums exp(x - maximum), and pass 4 divides. Passes 3 and 4 return at once if there are no
// such cells.
#pragma once

#include "ffi/core/launch_bounds.cuh"
#include "ffi/segment/extremum/table.cuh"
#include "ffi/segment/softmax/device.cuh"
#include "ffi/segment/sum/table.cuh"

namespace jax_baracuda::segment {

inline constexpr int kSoftmaxTableThreads = 256;
inline constexpr int kSoftmaxCacheThreads = 768;
inline constexpr int kSoftmaxRowsInFlight = 2;

template <typename T>
struct SoftmaxTableArguments {
  using C = ComputeType<T>;
  SegmentIds ids;
  Problem problem;
  const T* inputs[2];  // logits; or probabilities and their cotangents
  bool is_shared[2];   // by the batch
  T* output;
  C* sums;                   // [batch, segments, features]: of ScaledExp, or of products; zeroed by the caller
  TableKey<C>* maxima;       // the same shape; maxima of recomputed cells, 0 for the others
  C* sums_from_maximum;      // the same shape
  uint32_t* needs_max_pass;  // whether any cell is recomputed; zeroed by the caller
  uint32_t row_vectors;      // features / kVec
  int64_t blocks_per_batch;
  uint32_t first_segment, part_segments;  // the segments of the current part
  int cache_slots;                        // a power of two
};

// Rows that a thread processes at once, of one batch element, and kVec of their features from `feature` on.
template <int kRows>
struct TableRows {
  int64_t b;
  int64_t feature;
  // Past the end, the last row is repeated: conditional loads would wait for each other.
  int64_t row[kRows];
  bool exists[kRows];
  uint32_t segment[kRows];
};

template <int kVec, int kRows, int kThreads = kSoftmaxTableThreads, typename T, typename Body>
__device__ __forceinline__ void ForEachRows(const SoftmaxTableArguments<T>& a, Body&& body) {
  TableRows<kRows> rows;
  rows.b = blockIdx.x / static_cast<uint32_t>(a.blocks_per_batch);
  const int64_t thread = (blockIdx.x - rows.b * a.blocks_per_batch) * kThreads + threadIdx.x;
  const int64_t threads = a.blocks_per_batch * kThreads;
  const int64_t first_row = thread / a.row_vectors;
  rows.feature = (thread - first_row * a.row_vectors) * kVec;
  const int64_t rows_at_once = threads / a.row_vectors;
  if (first_row >= rows_at_once) return;
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : rows.b * a.problem.rows;
  for (int64_t first = first_row; first < a.problem.rows; first += kRows * rows_at_once) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      rows.row[u] = min(first + u * rows_at_once, a.problem.rows - 1);
      rows.exists[u] = first + u * rows_at_once < a.problem.rows;
      rows.segment[u] = a.ids[ids_offset + rows.row[u]];
    }
    body(rows);
  }
}

template <int kVec, typename T, int kRows>
__device__ __forceinline__ Vector<T, kVec> LoadRow(const SoftmaxTableArguments<T>& a, int input,
                                                   const TableRows<kRows>& rows, int u, bool is_read_again = false) {
  const int64_t place = a.is_shared[input] ? rows.row[u] : rows.b * a.problem.rows + rows.row[u];
  return is_read_again ? LoadVector<kVec>(a.inputs[input] + place * a.problem.features + rows.feature)
                       : LoadStreaming<kVec>(a.inputs[input] + place * a.problem.features + rows.feature);
}

template <typename T, int kRows>
__device__ __forceinline__ T* OutputOf(const SoftmaxTableArguments<T>& a, const TableRows<kRows>& rows, int u) {
  return a.output + (rows.b * a.problem.rows + rows.row[u]) * a.problem.features + rows.feature;
}

// The row's first cell; an arbitrary one for a dropped row.
template <typename T, int kRows>
__device__ __forceinline__ int64_t CellOf(const SoftmaxTableArguments<T>& a, const TableRows<kRows>& rows, int u) {
  const uint32_t segment = rows.segment[u] == kDropped ? 0 : rows.segment[u];
  return (rows.b * a.problem.segments + segment) * a.problem.features + rows.feature;
}

// Clears the tables that passes 2 and 3 use.
template <int kVec, int kThreads, typename T>
__device__ __forceinline__ void ClearTablesOfMaxima(const SoftmaxTableArguments<T>& a) {
  using C = ComputeType<T>;
  const int64_t cells = a.problem.batch * a.problem.segments * a.problem.features;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec; i < cells; i += threads * kVec) {
    StoreVector(a.maxima + i, Repeat<kVec>(TableKey<C>{0}));
    StoreVector(a.sums_from_maximum + i, Repeat<kVec>(C{0}));
  }
}

// Calls add(cell, terms) for the rows of the current part of the segments. Terms are ScaledExp of the logits, or the
// products of the gradient. With kIsReadAgain, operands may stay in L2 for the next pass.
template <int kVec, bool kBackward, bool kIsReadAgain, int kThreads, typename T, typename Add>
__device__ __forceinline__ void ForEachTerms(const SoftmaxTableArguments<T>& a, Add&& add) {
  using C = ComputeType<T>;
  ForEachRows<kVec, kSoftmaxRowsInFlight, kThreads>(a, [&](const auto& rows) {
    Vector<T, kVec> values[kSoftmaxRowsInFlight];
    [[maybe_unused]] Vector<T, kVec> d_values[kSoftmaxRowsInFlight];
#pragma unroll
    for (int u = 0; u < kSoftmaxRowsInFlight; ++u) {
      values[u] = LoadRow<kVec>(a, 0, rows, u, kIsReadAgain);
      if constexpr (kBackward) d_values[u] = LoadRow<kVec>(a, 1, rows, u, kIsReadAgain);
    }
#pragma unroll
    for (int u = 0; u < kSoftmaxRowsInFlight; ++u) {
      if (rows.segment[u] - a.first_segment >= a.part_segments || !rows.exists[u]) continue;
      Vector<C, kVec> terms;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const C value = static_cast<C>(values[u].lane[i]);
        if constexpr (kBackward) {
          terms.lane[i] = value * static_cast<C>(d_values[u].lane[i]);
        } else {
          terms.lane[i] = ScaledExp(value);
        }
      }
      add(CellOf(a, rows, u), terms);
    }
  });
}

template <typename T, int kVec, bool kBackward, bool kIsReadAgain>
__global__ void __launch_bounds__(kSoftmaxTableThreads, MinBlocks(kSoftmaxTableThreads, sizeof(T) == 8 ? 2 : 6))
    SumRowsKernel(const __grid_constant__ SoftmaxTableArguments<T> a) {
  if (!kBackward && a.first_segment == 0) ClearTablesOfMaxima<kVec, kSoftmaxTableThreads>(a);
  ForEachTerms<kVec, kBackward, kIsReadAgain, kSoftmaxTableThreads>(
      a, [&](int64_t cell, const auto& terms) { AtomicAddVector(a.sums + cell, terms); });
}

// The same through a cache in the shared memory of each block. A slot goes to the first cell that maps to it. The
// hottest cells come early, so they get slots, and their additions do not contend in L2.
template <typename T, int kVec, bool kBackward, bool kIsReadAgain>
__global__ void __launch_bounds__(kSoftmaxCacheThreads, MinBlocks(kSoftmaxCacheThreads, sizeof(T) == 8 ? 1 : 2))
    SumRowsCachedKernel(const __grid_constant__ SoftmaxTableArguments<T> a) {
  using C = ComputeType<T>;
  using Cells = Vector<C, kVec>;
  constexpr uint32_t kFree = 0xffffffffu;
  extern __shared__ uint4 cache_memory[];
  Cells* const cached = reinterpret_cast<Cells*>(cache_memory);
  uint32_t* const owners = reinterpret_cast<uint32_t*>(cached + a.cache_slots);
  for (int i = threadIdx.x; i < a.cache_slots; i += kSoftmaxCacheThreads) {
    cached[i] = Repeat<kVec>(C{0});
    owners[i] = kFree;
  }
  if (!kBackward && a.first_segment == 0) ClearTablesOfMaxima<kVec, kSoftmaxCacheThreads>(a);
  __syncthreads();
  const int shift = __clz(a.cache_slots) + 1;
  ForEachTerms<kVec, kBackward, kIsReadAgain, kSoftmaxCacheThreads>(a, [&](int64_t cell, const auto& terms) {
    const uint32_t key = static_cast<uint32_t>(cell / kVec);
    const uint32_t slot = key * 0x9e3779b1u >> shift;
    uint32_t owner = owners[slot];
    if (owner == kFree) {
      owner = atomicCAS(owners + slot, kFree, key);
      if (owner == kFree) owner = key;
    }
    if (owner == key) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) atomicAdd(&cached[slot].lane[i], terms.lane[i]);
    } else {
      AtomicAddVector(a.sums + cell, terms);
    }
  });
  __syncthreads();
  for (int i = threadIdx.x; i < a.cache_slots; i += kSoftmaxCacheThreads) {
    if (owners[i] != kFree) AtomicAddVector(a.sums + static_cast<int64_t>(owners[i]) * kVec, cached[i]);
  }
}

// Pass 2: divides by the sums that are in range, and finds the maxima of the other cells.
template <typename T, int kVec>
__global__ void __launch_bounds__(kSoftmaxTableThreads, MinBlocks(kSoftmaxTableThreads, sizeof(T) == 8 ? 3 : 8))
    DivideKernel(const __grid_constant__ SoftmaxTableArguments<T> a) {
  using C = ComputeType<T>;
  ForEachRows<kVec, 1>(a, [&](const auto& rows) {
    const Vector<T, kVec> values = LoadRow<kVec>(a, 0, rows, 0);
    const int64_t cell = CellOf(a, rows, 0);
    const Vector<C, kVec> sums = LoadVector<kVec>(a.sums + cell);
    Vector<T, kVec> result = Repeat<kVec>(static_cast<T>(C{0}));
    if (rows.segment[0] != kDropped) {
      bool needs_max_pass = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const C sum = sums.lane[i];
        result.lane[i] = static_cast<T>(AtMostOne(ScaledExp(static_cast<C>(values.lane[i])) * Reciprocal(sum)));
        needs_max_pass |= !IsInRange(sum);
      }
      if (needs_max_pass) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (IsInRange(sums.lane[i])) continue;
          const TableKey<C> key = EncodeKey(static_cast<C>(values.lane[i]));
          if (key > a.maxima[cell + i]) atomicMax(a.maxima + cell + i, key);
        }
        if (*a.needs_max_pass == 0) *a.needs_max_pass = 1;
      }
    }
    StoreStreaming(OutputOf(a, rows, 0), result);
  });
}

// Pass 3 sums exp(x - maximum) for the recomputed cells. Pass 4, with kDivides, divides by these sums.
template <typename T, int kVec, bool kDivides>
__global__ void __launch_bounds__(kSoftmaxTableThreads)
    MaxPassKernel(const __grid_constant__ SoftmaxTableArguments<T> a) {
  using C = ComputeType<T>;
  if (*a.needs_max_pass == 0) return;
  ForEachRows<kVec, kSoftmaxRowsInFlight>(a, [&](const auto& rows) {
#pragma unroll
    for (int u = 0; u < kSoftmaxRowsInFlight; ++u) {
      if (rows.segment[u] == kDropped || !rows.exists[u]) continue;
      const int64_t cell = CellOf(a, rows, u);
      const Vector<C, kVec> sums = LoadVector<kVec>(a.sums + cell);
      bool needs_max_pass = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) needs_max_pass |= !IsInRange(sums.lane[i]);
      if (!needs_max_pass) continue;
      const Vector<T, kVec> values = LoadRow<kVec>(a, 0, rows, u);
      T* const output = OutputOf(a, rows, u);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (IsInRange(sums.lane[i])) continue;
        const C weight = exp(static_cast<C>(values.lane[i]) - DecodeKey<C>(a.maxima[cell + i]));
        if constexpr (kDivides) {
          output[i] = static_cast<T>(AtMostOne(weight * Reciprocal(a.sums_from_maximum[cell + i])));
        } else {
          atomicAdd(a.sums_from_maximum + cell + i, weight);
        }
      }
    }
  });
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kSoftmaxTableThreads, MinBlocks(kSoftmaxTableThreads, sizeof(T) == 8 ? 3 : 8))
    GradientKernel(const __grid_constant__ SoftmaxTableArguments<T> a) {
  using C = ComputeType<T>;
  ForEachRows<kVec, 1>(a, [&](const auto& rows) {
    const Vector<T, kVec> values = LoadRow<kVec>(a, 0, rows, 0), d_values = LoadRow<kVec>(a, 1, rows, 0);
    const Vector<C, kVec> sums = LoadVector<kVec>(a.sums + CellOf(a, rows, 0));
    Vector<T, kVec> result = Repeat<kVec>(static_cast<T>(C{0}));
    if (rows.segment[0] != kDropped) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        result.lane[i] = static_cast<T>(
            SoftmaxGradient(static_cast<C>(values.lane[i]), static_cast<C>(d_values.lane[i]), sums.lane[i]));
      }
    }
    StoreStreaming(OutputOf(a, rows, 0), result);
  });
}

}  // namespace jax_baracuda::segment
