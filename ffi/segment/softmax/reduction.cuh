// The totals of softmax and its gradient as reductions (see engine/reduction.cuh). Tiles fill the accumulators, which
// therefore have no Start and Add.
#pragma once

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/softmax/arithmetic.h"
#include "ffi/segment/sum/reduction.cuh"

namespace jax_baracuda::segment {

template <typename T, bool kBackward>
struct SoftmaxReduction {
  using C = ComputeType<T>;
  using Element = T;
  using Total = SoftmaxState<C>;

  struct Outputs {
    Total* totals;  // [segments, features]
  };

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(C) * kCount)) Accumulator {
    C maximum[kCount], sum[kCount];

    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        SoftmaxState<C> state{maximum[i], sum[i]};
        if (maximum[i] == other.maximum[i]) {
          state.sum += other.sum[i];
        } else {
          MergeSoftmax(state, SoftmaxState<C>{other.maximum[i], other.sum[i]});
        }
        maximum[i] = state.maximum;
        sum[i] = state.sum;
      }
    }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) outputs.totals[segment * features + feature + i] = {maximum[i], sum[i]};
    }
  };
};

// The gradient needs sums alone.
template <typename T>
struct SoftmaxReduction<T, true> : SumReduction<ComputeType<T>> {
  using Total = ComputeType<T>;
};

}  // namespace jax_baracuda::segment
