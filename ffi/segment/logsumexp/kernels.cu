// The CUDA kernels of segment_logsumexp.

#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/logsumexp/logsumexp.h"

namespace jax_baracuda::segment {
namespace {

// The reduction, for the kernels of engine/reduction.cuh.
template <typename T>
struct LogSumExpReduction {
  using Element = T;
  static constexpr int kRowsInFlight = 4;
  static constexpr int kTileBlocks = 6;
  using C = ComputeType<T>;

  struct Outputs {
    C *maxima, *totals;
  };

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(C) * kCount)) Accumulator {
    LogSumExp<C> cell[kCount];

    __device__ __forceinline__ void Start() {
#pragma unroll
      for (auto& of_one : cell) of_one = LogSumExp<C>::OfNoRows();
    }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, const Outputs&) {
      const Vector<C, kCount> wide = Widen(values);
#pragma unroll
      for (int i = 0; i < kCount; ++i) cell[i].Add(wide.lane[i]);
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) cell[i].Merge(other.cell[i]);
    }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      Vector<C, kCount> maxima, totals;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        maxima.lane[i] = cell[i].maximum;
        totals.lane[i] = cell[i].Total();
      }
      StoreVector(outputs.maxima + segment * features + feature, maxima);
      StoreVector(outputs.totals + segment * features + feature, totals);
    }
  };
};

ReducePlan PlanOf(const LogSumExpCall& call) { return PlanByRule(call, PairStateBytes(call.type)); }

}  // namespace

std::vector<const char*> LogSumExpCall::Strategies() { return ReduceStrategies(); }

Plan LogSumExpCall::MakePlan() const { return PlanOf(*this).Summary(); }

CudaStatus LogSumExpCall::Run(cudaStream_t stream) const {
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    const typename LogSumExpReduction<T>::Outputs outputs{static_cast<C*>(maxima), static_cast<C*>(totals)};
    return LaunchReduction<LogSumExpReduction<T>>(*this, PlanOf(*this), outputs, stream);
  });
}

}  // namespace jax_baracuda::segment
