// The gradients of segment_sum and segment_mean.
#include "ffi/segment/engine/map_rows.cuh"
#include "ffi/segment/gather/call.h"

namespace jax_baracuda::segment {
namespace {

template <typename T>
struct GatherCells {
  BatchArray<T> cells;
  BatchArray<int32_t> count;  // of means
  int64_t features;

  template <int kVec>
  __device__ __forceinline__ Vector<T, kVec> At(int64_t b, uint32_t segment, int64_t, int64_t feature) const {
    Vector<T, kVec> values = LoadVector<kVec>(cells.Of(b) + segment * features + feature);
    if (count.data != nullptr) {
      using C = ComputeType<T>;
      const C rows = static_cast<C>(max(__ldg(count.Of(b) + segment), 1));
#pragma unroll
      for (int i = 0; i < kVec; ++i) values.lane[i] = static_cast<T>(static_cast<C>(values.lane[i]) / rows);
    }
    return values;
  }
};

}  // namespace

std::vector<const char*> GatherCall::Strategies() { return MapStrategies(); }

Plan GatherCall::MakePlan() const { return PlanMapRows(problem, ElementBytes(type)); }

CudaStatus GatherCall::Run(cudaStream_t stream) const {
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GatherCells<T> function{
        {cells, problem.segments * problem.features}, {count, problem.segments}, problem.features};
    return LaunchMapRows(problem, segment_ids, ids_are_64_bit, function, static_cast<T*>(rows), stream);
  });
}

}  // namespace jax_baracuda::segment
