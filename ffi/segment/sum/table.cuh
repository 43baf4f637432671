// Segment sum of rows in any order, by atomic additions to a table of the cells.
#pragma once

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/sum/reduction.cuh"

namespace jax_baracuda::segment {

template <typename T>
struct SumTableArguments {
  using C = ComputeType<T>;
  const T* data;
  SegmentIds ids;
  Problem problem;
  C* table;        // [batch, segments, features], zeroed by the caller
  int32_t* count;  // [batch, segments], zeroed by the caller; or nullptr
  int64_t blocks_per_batch;
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

// For rows that are whole vectors: features are a multiple of kVec. Bound by the atomic additions.
template <typename T, int kVec>
__global__ void __launch_bounds__(kSumTableThreads) SumTableKernel(const __grid_constant__ SumTableArguments<T> a) {
  using C = ComputeType<T>;
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
    if (a.count != nullptr && feature[u] == 0) atomicAdd(a.count + b * a.problem.segments + segment[u], 1);
  }
}

// Writes the results from a finished table, which may be `output` itself if the types are the same.
template <typename T>
__global__ void __launch_bounds__(256) FinishSumTableKernel(const ComputeType<T>* table, const int32_t* count,
                                                            int64_t features, int64_t cells, T* output) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= cells) return;
  ComputeType<T> sum = table[i];
  if (count != nullptr) sum /= static_cast<ComputeType<T>>(max(count[i / features], 1));
  output[i] = static_cast<T>(sum);
}

}  // namespace jax_baracuda::segment
