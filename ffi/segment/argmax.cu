// The positions of maxima and minima.
#include "ffi/segment/extremum.cuh"
#include "ffi/segment/extremum_device.cuh"
#include "ffi/segment/reduce.cuh"

namespace jax_baracuda::segment {
namespace {

int64_t StateBytes(int64_t element_bytes) { return element_bytes == 8 ? 16 : 8; }

}  // namespace

int64_t ArgScratchBytes(const Problem& problem, int64_t element_bytes, bool indices_are_sorted) {
  if (problem.HasNoResult()) return 0;
  const int64_t state_bytes = StateBytes(element_bytes);
  return ReduceScratchBytes(problem, ChooseWay(problem, element_bytes, state_bytes, indices_are_sorted), element_bytes,
                            state_bytes);
}

cudaError_t LaunchArg(const ArgArguments& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  if (problem.HasNoResult()) return cudaSuccess;
  cudaError_t error = cudaErrorInvalidValue;
  DispatchWide(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Way way = ChooseWay(problem, sizeof(T), StateBytes(sizeof(T)), arguments.indices_are_sorted);
    if (!SegmentsFit(problem.segments) || (way == Way::kOrderTiles && !OrderFits(problem)) ||
        arguments.scratch_bytes < ReduceScratchBytes(problem, way, sizeof(T), StateBytes(sizeof(T)))) {
      return;
    }
    const typename ArgReduction<T>::Outputs outputs{arguments.row, static_cast<int32_t>(problem.rows),
                                                    FlipWordMask<T>(arguments.type, arguments.is_minimum)};
    const Reducer<ArgReduction<T>> reducer{problem,
                                           way,
                                           static_cast<const T*>(arguments.data),
                                           arguments.segment_ids,
                                           arguments.ids_are_64_bit,
                                           outputs,
                                           StateBytes(sizeof(T)),
                                           arguments.scratch,
                                           stream};
    error = reducer.Launch();
  });
  return error;
}

}  // namespace jax_baracuda::segment
