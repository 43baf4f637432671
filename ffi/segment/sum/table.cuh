// Segment sum of rows in any order, by atomic additions to a table of the cells.
#pragma once

#include "ffi/core/divider.cuh"
#include "ffi/core/launch_bounds.cuh"
#include "ffi/segment/engine/unordered_rows.cuh"
#include "ffi/segment/sum/reduction.cuh"

namespace jax_baracuda::segment {

template <typename T>
struct SumTableArguments : UnorderedRows<T> {
  using C = ComputeType<T>;
  C* table;        // [batch, segments, features], zeroed by the caller; unused if a batch element has one block
  int32_t* count;  // [batch, segments], zeroed by the caller; or nullptr
  T* output;       // may be the table itself if the types are the same
  int64_t sum_blocks, count_blocks_per_batch;  // of SumTableKernel; the blocks that count follow those that add
};

template <typename C>
__device__ __forceinline__ void AtomicAdd(C* address, C value) {
  if constexpr (sizeof(C) == 8 && !std::is_floating_point_v<C>) {
    atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
  } else {
    atomicAdd(address, value);
  }
}

// Adds to neighbouring cells, with one instruction if the hardware has it. `address` is aligned to the vector.
template <typename C, int kCount>
__device__ __forceinline__ void AtomicAddVector(C* address, const Vector<C, kCount>& values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kHasVectors = std::is_same_v<C, float>;
#else
  constexpr bool kHasVectors = false;
#endif
  if constexpr (kHasVectors && kCount == 4) {
    atomicAdd(reinterpret_cast<float4*>(address),
              make_float4(values.lane[0], values.lane[1], values.lane[2], values.lane[3]));
  } else if constexpr (kHasVectors && kCount == 2) {
    atomicAdd(reinterpret_cast<float2*>(address), make_float2(values.lane[0], values.lane[1]));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) AtomicAdd(address + i, values.lane[i]);
  }
}

inline constexpr int kSumTableThreads = 256;
inline constexpr int kSumVectorsInFlight = 4;

// Counts the rows of each segment. Additions to sums and to counts at the same time would evict each other from L2.
template <typename T>
__device__ __forceinline__ void CountRows(const SumTableArguments<T>& a, int64_t block) {
  const int64_t b = block / a.count_blocks_per_batch, rows = a.problem.rows;
  const int64_t first = (block - b * a.count_blocks_per_batch) * kSumTableThreads * kSumVectorsInFlight + threadIdx.x;
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * rows;
#pragma unroll
  for (int u = 0; u < kSumVectorsInFlight; ++u) {
    const int64_t row = first + u * kSumTableThreads;
    const uint32_t segment = row < rows ? a.ids[ids_offset + row] : kDropped;
    if (segment != kDropped) atomicAdd(a.count + b * a.problem.segments + segment, 1);
  }
}

// For rows that are whole vectors: features are a multiple of kVec. Bound by the atomic additions.
template <typename T, int kVec>
__global__ void __launch_bounds__(kSumTableThreads) SumTableKernel(const __grid_constant__ SumTableArguments<T> a) {
  using C = ComputeType<T>;
  if (blockIdx.x >= a.sum_blocks) return CountRows(a, blockIdx.x - a.sum_blocks);
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const int64_t features = a.problem.features, row_vectors = features / kVec, vectors = a.problem.rows * row_vectors;
  const T* const data = a.data + (a.problem.data_is_shared ? 0 : b * vectors * kVec);
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
  C* const table = a.table + b * a.problem.segments * features;
  const int64_t block_begin =
      (blockIdx.x - b * a.blocks_per_batch) * int64_t{kSumTableThreads} * kSumVectorsInFlight + threadIdx.x;
  Vector<T, kVec> values[kSumVectorsInFlight];
  uint32_t segment[kSumVectorsInFlight];
  int64_t feature[kSumVectorsInFlight];
#pragma unroll
  for (int u = 0; u < kSumVectorsInFlight; ++u) {
    const int64_t vector = block_begin + u * kSumTableThreads;
    segment[u] = kDropped;
    if (vector < vectors) {
      values[u] = LoadStreaming<kVec>(data + vector * kVec);
      // Vector numbers usually fit in 32 bits, where a division costs a quarter.
      const int64_t row = vectors <= 0xffffffff ? static_cast<uint32_t>(vector) / static_cast<uint32_t>(row_vectors)
                                                : vector / row_vectors;
      feature[u] = (vector - row * row_vectors) * kVec;
      segment[u] = a.ids[ids_offset + row];
    }
  }
#pragma unroll
  for (int u = 0; u < kSumVectorsInFlight; ++u) {
    if (segment[u] == kDropped) continue;
    Vector<C, kVec> terms;
#pragma unroll
    for (int i = 0; i < kVec; ++i) terms.lane[i] = static_cast<C>(values[u].lane[i]);
    AtomicAddVector(table + segment[u] * features + feature[u], terms);
  }
}

// The result of a finished cell. `count` is nullptr for sums.
template <typename T>
__device__ __forceinline__ T SumResult(ComputeType<T> sum, const int32_t* count) {
  if (count != nullptr) sum /= static_cast<ComputeType<T>>(max(*count, 1));
  return static_cast<T>(sum);
}

// Writes the results from a finished table, in vectors that do not cross rows.
template <typename T, int kVec>
__global__ void __launch_bounds__(kSumTableThreads)
    FinishSumTableKernel(const __grid_constant__ SumTableArguments<T> a, const __grid_constant__ Divider by_row_vectors,
                         int64_t vectors) {
  const int64_t vector = int64_t{blockIdx.x} * kSumTableThreads + threadIdx.x;
  if (vector >= vectors) return;
  const auto sums = LoadVector<kVec>(a.table + vector * kVec);
  const int32_t* const count = a.count == nullptr ? nullptr : a.count + by_row_vectors.Quotient(vector);
  Vector<T, kVec> results;
#pragma unroll
  for (int i = 0; i < kVec; ++i) results.lane[i] = SumResult<T>(sums.lane[i], count);
  StoreVector(a.output + vector * kVec, results);
}

// Each block keeps a table in shared memory (see engine/unordered_rows.cuh). The only block of a batch element writes
// its results; several blocks add their tables to the one in global memory.
template <typename T, int kVec>
__global__ void __launch_bounds__(kSharedTableThreads, MinBlocks(kSharedTableThreads, kSharedTableBlocks))
    SharedSumTableKernel(const __grid_constant__ SumTableArguments<T> a) {
  using C = ComputeType<T>;
  extern __shared__ uint4 shared_sum_memory[];
  C* const sums = reinterpret_cast<C*>(shared_sum_memory);
  const int segments = static_cast<int>(a.problem.segments), features = static_cast<int>(a.problem.features);
  const int cells = segments * features, counters = a.count == nullptr ? 0 : segments;
  int32_t* const counts = reinterpret_cast<int32_t*>(sums + cells);
  for (int i = threadIdx.x; i < cells; i += blockDim.x) sums[i] = C{0};
  for (int i = threadIdx.x; i < counters; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  ForEachElements<int32_t, kVec>(a, b, [&](const auto& elements) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (!elements.IsDropped(i)) AtomicAdd(sums + elements.Cell(i), static_cast<C>(elements.values.lane[i]));
    }
  });
  if (counters > 0) {
    const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
    const int64_t first = (blockIdx.x - b * a.blocks_per_batch) * blockDim.x + threadIdx.x;
    for (int64_t row = first; row < a.problem.rows; row += a.blocks_per_batch * blockDim.x) {
      const uint32_t segment = a.ids[ids_offset + row];
      if (segment != kDropped) atomicAdd(counts + segment, 1);
    }
  }
  __syncthreads();
  int32_t* const all_counts = a.count + b * counters;
  if (a.blocks_per_batch == 1) {
    for (int i = threadIdx.x; i < cells; i += blockDim.x) {
      a.output[b * cells + i] = SumResult<T>(sums[i], counters == 0 ? nullptr : counts + i / features);
    }
    for (int i = threadIdx.x; i < counters; i += blockDim.x) all_counts[i] = counts[i];
    return;
  }
  for (int i = threadIdx.x; i < cells; i += blockDim.x) AtomicAdd(a.table + b * cells + i, sums[i]);
  for (int i = threadIdx.x; i < counters; i += blockDim.x) atomicAdd(all_counts + i, counts[i]);
}

}  // namespace jax_baracuda::segment
