// The gradients of segment_sum and segment_mean.
#include "ffi/segment/engine/map_rows.cuh"
#include "ffi/segment/gather/launch.cuh"

namespace jax_baracuda::segment {
namespace {

template <typename T>
struct GatherCells {
  const T* cells;
  const int32_t* count;
  int64_t cells_per_batch, segments_per_batch;  // 0 where the batch shares them
  int64_t features;

  template <int kVec>
  __device__ __forceinline__ Vector<T, kVec> At(int64_t b, uint32_t segment, int64_t feature, int64_t) const {
    Vector<T, kVec> values = LoadVector<kVec>(cells + b * cells_per_batch + segment * features + feature);
    if (count != nullptr) {
      using C = ComputeType<T>;
      const C rows = static_cast<C>(max(__ldg(count + b * segments_per_batch + segment), 1));
#pragma unroll
      for (int i = 0; i < kVec; ++i) values.lane[i] = static_cast<T>(static_cast<C>(values.lane[i]) / rows);
    }
    return values;
  }
};

}  // namespace

Plan PlanGather(const GatherCall& call) { return PlanMapRows(call.problem, ElementBytes(call.type)); }

CudaStatus LaunchGather(const GatherCall& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GatherCells<T> function{static_cast<const T*>(arguments.cells), arguments.count,
                                  arguments.cells_are_shared ? 0 : problem.segments * problem.features,
                                  arguments.count_is_shared ? 0 : problem.segments, problem.features};
    status = LaunchMapRows(problem, arguments.segment_ids, arguments.ids_are_64_bit, function,
                           static_cast<T*>(arguments.rows), stream);
  });
  return status;
}

}  // namespace jax_baracuda::segment
