// The gradient of segment_max and segment_min: each cell's cotangent goes to its winner, or to all rows that tie.
#include "ffi/segment/engine/map_rows.cuh"
#include "ffi/segment/extremum/arithmetic.h"
#include "ffi/segment/extremum/call.h"

namespace jax_baracuda::segment {
namespace {

template <typename T>
struct ExtremumGradient {
  using C = ComputeType<T>;

  BatchArray<T> d_output;
  BatchArray<int32_t> winner;
  BatchArray<T> data;  // if ties are shared
  const T* output;     // likewise; shared by the batch as winners are
  int64_t features;

  template <int kVec>
  __device__ __forceinline__ Vector<T, kVec> At(int64_t b, uint32_t segment, int64_t row, int64_t feature) const {
    const int64_t cell = segment * features + feature;
    const auto winners = LoadVector<kVec>(winner.Of(b) + cell);
    const auto cotangents = LoadVector<kVec>(d_output.Of(b) + cell);
    Vector<T, kVec> gradient;
    bool has_tie = false;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      gradient.lane[i] = winners.lane[i] == row ? cotangents.lane[i] : static_cast<T>(C{0});
      has_tie |= IsTie(winners.lane[i]);
    }
    if (!has_tie || data.data == nullptr) return gradient;
    const auto values = LoadStreaming<kVec>(data.Of(b) + row * features + feature);
    const auto extrema = LoadVector<kVec>(output + b * winner.stride + cell);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (!IsTie(winners.lane[i])) continue;
      const bool attains = static_cast<C>(values.lane[i]) == static_cast<C>(extrema.lane[i]);
      gradient.lane[i] = attains ? TiedShare(winners.lane[i], cotangents.lane[i]) : static_cast<T>(C{0});
    }
    return gradient;
  }
};

}  // namespace

std::vector<const char*> ExtremumBackwardCall::Strategies() { return MapStrategies(); }

Plan ExtremumBackwardCall::MakePlan() const { return PlanMapRows(problem, ElementBytes(type)); }

CudaStatus ExtremumBackwardCall::Run(cudaStream_t stream) const {
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t cells = problem.segments * problem.features;
    const ExtremumGradient<T> function{{d_output, cells},
                                       {winner, cells},
                                       {data, problem.rows * problem.features},
                                       static_cast<const T*>(output.data),
                                       problem.features};
    return LaunchMapRows(problem, segment_ids, ids_are_64_bit, function, static_cast<T*>(d_data), stream);
  });
}

}  // namespace jax_baracuda::segment
