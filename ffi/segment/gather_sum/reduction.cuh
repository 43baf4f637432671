// Sums of gathered rows as reductions in registers (see engine/reduction.cuh).
#pragma once

#include <cstdint>

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/gather_sum/call.h"
#include "ffi/segment/gather_sum/launch.cuh"
#include "ffi/segment/sum/reduction.cuh"

namespace jax_baracuda::segment {

// As SumReduction. Weights multiply as the terms are accumulated; product and sum are rounded once together.
template <typename T, bool kHasWeights>
struct GatherSumReduction {
  using Element = T;
  static constexpr int kRowsInFlight = SumReduction<T>::kRowsInFlight;
  static constexpr int kTileBlocks = SumReduction<T>::kTileBlocks;
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
    __device__ __forceinline__ void AddScaled(const Vector<T, kCount>& values, T weight) {
      const Vector<C, kCount> wide = Widen(values);
      const C scale = static_cast<C>(weight);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum.sum[i] += scale * wide.lane[i];
    }
    __device__ __forceinline__ void Normalize() {}
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) { sum.Merge(other.sum, {}); }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      if (outputs.is_wide) {
        C* const output = static_cast<C*>(outputs.output) + segment * features + feature;
#pragma unroll
        for (int i = 0; i < kCount; ++i) output[i] = sum.sum[i];
      } else {
        sum.Store({static_cast<T*>(outputs.output)}, segment, features, feature);
      }
    }
  };
};

template <typename T>
inline constexpr bool kTakesWeights<GatherSumReduction<T, true>> = true;

template <typename T, bool kHasWeights>
inline constexpr bool kTakesPrivateTable<GatherSumReduction<T, kHasWeights>> = false;

// How edges are brought into order, and how many elements of the batch are taken at once.
struct GatherGrid {
  Strategy strategy;
  int64_t elements_at_once;
  int64_t part_features;  // as in Reducer
};

// With weights; a translation unit of its own.
CudaStatus LaunchWeightedGatherSum(const GatherSumCall& call, const GatherGrid& grid, cudaStream_t stream);

template <bool kHasWeights>
CudaStatus ReduceGathered(const GatherSumCall& call, const GatherGrid& grid, cudaStream_t stream) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Reduction = GatherSumReduction<T, kHasWeights>;
    Reducer<Reduction, /*kGathers=*/true> reducer{};
    reducer.problem = call.problem;
    reducer.strategy = grid.strategy;
    reducer.elements_at_once = grid.elements_at_once;
    reducer.part_features = grid.part_features;
    reducer.data = static_cast<const T*>(call.data);
    reducer.gathering = {call.gather_ids,
                         call.gather_ids_are_shared,
                         call.clips_gather_ids,
                         call.num_rows,
                         call.edge_order,
                         call.edge_order_is_shared,
                         static_cast<const T*>(call.weights),
                         call.weights_are_shared,
                         call.heads,
                         call.FeaturesPerHead()};
    reducer.segment_ids = call.segment_ids;
    reducer.ids_are_64_bit = call.ids_are_64_bit;
    reducer.outputs = {call.output, call.is_wide};
    reducer.state_bytes = sizeof(ComputeType<T>);
    reducer.scratch = call.scratch;
    reducer.stream = stream;
    status = reducer.Launch();
  });
  return status;
}

}  // namespace jax_baracuda::segment
