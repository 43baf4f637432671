// Sums of gathered rows as reductions in registers (see engine/reduction.cuh).
#pragma once

#include <cstdint>

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/gather_sum/call.h"
#include "ffi/segment/sum/reduction.cuh"

namespace jax_baracuda::segment {

// As SumReduction. A weight is applied as its term is accumulated, so that product and sum are rounded once. Vectors of
// weights take as many registers as the rows.
template <typename T, bool kHasWeightVectors = false>
struct GatherSumReduction {
  using Element = T;
  static constexpr int kRowsInFlight = SumReduction<T>::kRowsInFlight / (kHasWeightVectors ? 2 : 1);
  static constexpr int kTileBlocks = kHasWeightVectors ? 6 : SumReduction<T>::kTileBlocks;
  using C = ComputeType<T>;

  struct Outputs {
    void* output;
    bool is_wide;  // results in C
  };

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(C) * kCount)) Accumulator {
    typename SumReduction<T>::template Accumulator<kCount> sum;

    __device__ __forceinline__ void Start() { sum.Start(); }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t row, const Outputs&) {
      sum.Add(values, row, {});
    }
    __device__ __forceinline__ void AddScaled(const Vector<T, kCount>& values, const Vector<T, kCount>& weights) {
      const Vector<C, kCount> wide = Widen(values), scales = Widen(weights);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum.sum[i] += scales.lane[i] * wide.lane[i];
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) { sum.Merge(other.sum, {}); }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      if (outputs.is_wide) {
        Vector<C, kCount> result;
#pragma unroll
        for (int i = 0; i < kCount; ++i) result.lane[i] = sum.sum[i];
        StoreVector(static_cast<C*>(outputs.output) + segment * features + feature, result);
      } else {
        sum.Store({static_cast<T*>(outputs.output)}, segment, features, feature);
      }
    }
  };
};

}  // namespace jax_baracuda::segment
