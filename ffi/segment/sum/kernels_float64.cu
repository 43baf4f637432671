// Sums and means in double, in registers. They have no atomic additions, so all of them have the same bits in every run,
// and only the kernels for any rows: tiles, and the kernel of few rows.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/sum/arithmetic.h"
#include "ffi/segment/sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

// See engine/reduction.cuh. Sums and means share it, because its kernels take long to compile.
template <typename T>
struct Float64Reduction {
  using Element = T;
  static constexpr int kRowsInFlight = 8;
  static constexpr int kTileBlocks = sizeof(T) < 4 ? 4 : 6;

  struct Outputs {
    T* output;
    int32_t* count;  // of means; otherwise nullptr
  };

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(double) * kCount)) Accumulator {
    double sum[kCount];
    int32_t rows;

    __device__ __forceinline__ void Start() {
#pragma unroll
      for (double& s : sum) s = 0;
      rows = 0;
    }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, const Outputs&) {
      const Vector<float, kCount> wide = Widen(values);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += static_cast<double>(wide.lane[i]);
      ++rows;
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += other.sum[i];
      rows += other.rows;
    }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      const bool is_mean = outputs.count != nullptr;
      Vector<T, kCount> result;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const double number = is_mean ? sum[i] / static_cast<double>(max(rows, 1)) : sum[i];
        result.lane[i] = static_cast<T>(RoundedFor<T>(number));
      }
      StoreVector(outputs.output + segment * features + feature, result);
      if (is_mean && feature == 0) outputs.count[segment] = rows;
    }
  };
};

// The Input of these rows (see tiles.cuh). Not OwnRows itself, for which the kernels of narrow rows would be compiled.
template <typename T>
struct RowsByTiles : OwnRows<T> {
  void Advance(int64_t, int64_t, int64_t) {}
};

}  // namespace

template <typename T>
inline constexpr bool kStoresCellsAlone<Float64Reduction<T>> = false;

ReducePlan PlanFloat64(const SumCall& call) {
  constexpr int64_t kStateBytes = sizeof(Float64Reduction<float>::Accumulator<1>);
  return PlanPairs(call, call.indices_are_sorted, kStateBytes);
}

CudaStatus ReduceFloat64(const SumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchBelowFloat64), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename Float64Reduction<T>::Outputs outputs{static_cast<T*>(call.output), call.count};
    return LaunchReduction<Float64Reduction<T>>(call, plan, outputs, stream, RowsByTiles<T>{});
  });
}

}  // namespace jax_baracuda::segment
