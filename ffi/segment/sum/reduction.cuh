// Sums and means as reductions in registers (see engine/reduction.cuh).
#pragma once

#include <cstdint>

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/sum/call.h"

namespace jax_baracuda::segment {

// Terms are added in ComputeType, in an order that depends on shapes and ids only. The result is rounded once.
template <typename T>
struct SumReduction {
  using Element = T;
  static constexpr int kRowsInFlight = sizeof(T) == 8 ? 4 : 8;
  static constexpr int kTileBlocks = sizeof(T) < 4 ? 6 : 8;
  using C = ComputeType<T>;

  struct Outputs {
    T* output;
  };

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(C) * kCount)) Accumulator {
    C sum[kCount];

    __device__ __forceinline__ void Start() {
#pragma unroll
      for (C& s : sum) s = C{0};
    }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, const Outputs&) {
      const Vector<C, kCount> wide = Widen(values);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += wide.lane[i];
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += other.sum[i];
    }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      Vector<T, kCount> result;
#pragma unroll
      for (int i = 0; i < kCount; ++i) result.lane[i] = static_cast<T>(sum[i]);
      StoreVector(outputs.output + segment * features + feature, result);
    }
  };
};

// The mean, 0 where there are no rows, and the number of rows of each segment.
template <typename T>
struct MeanReduction {
  using Element = T;
  static constexpr int kRowsInFlight = SumReduction<T>::kRowsInFlight;
  static constexpr int kTileBlocks = SumReduction<T>::kTileBlocks;
  using C = ComputeType<T>;

  struct Outputs {
    T* output;
    int32_t* count;
  };

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(C) * kCount)) Accumulator {
    typename SumReduction<T>::template Accumulator<kCount> sum;
    int32_t rows;

    __device__ __forceinline__ void Start() {
      sum.Start();
      rows = 0;
    }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t row, const Outputs&) {
      sum.Add(values, row, {});
      ++rows;
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
      sum.Merge(other.sum, {});
      rows += other.rows;
    }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      auto mean = sum;
#pragma unroll
      for (C& s : mean.sum) s /= static_cast<C>(max(rows, 1));
      mean.Store({outputs.output}, segment, features, feature);
      if (feature == 0) outputs.count[segment] = rows;
    }
  };
};

// Means also store a count per segment.
template <typename T>
inline constexpr bool kStoresCellsAlone<MeanReduction<T>> = false;

// Means in registers (see engine/reduce.cuh), in a separate file: they compile as many kernels as sums.
struct ReducePlan;
CudaStatus ReduceMean(const SumCall& call, const ReducePlan& plan, cudaStream_t stream);

// Sums and means in double, also separate.
ReducePlan PlanFloat64(const SumCall& call);
CudaStatus ReduceFloat64(const SumCall& call, const ReducePlan& plan, cudaStream_t stream);

}  // namespace jax_baracuda::segment
