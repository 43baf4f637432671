// Products and their gradient.
#include "ffi/segment/map_rows.cuh"
#include "ffi/segment/product.cuh"
#include "ffi/segment/product_device.cuh"
#include "ffi/segment/reduce.cuh"

namespace jax_baracuda::segment {
namespace {

int64_t StateBytes(int64_t element_bytes) { return element_bytes == 8 ? 16 : 8; }

template <typename T>
struct ProductGradient {
  using C = ComputeType<T>;
  const T* d_output;
  const C* mantissa;
  const int32_t* packed;
  const T* data;
  int64_t d_output_per_batch, product_per_batch, data_per_batch;  // elements; 0 where the batch shares them
  int64_t features;

  template <int kVec>
  __device__ __forceinline__ Vector<T, kVec> At(int64_t b, uint32_t segment, int64_t feature, int64_t element) const {
    const int64_t cell = segment * features + feature;
    const auto d_values = LoadVector<kVec>(d_output + b * d_output_per_batch + cell);
    const auto mantissas = LoadVector<kVec>(mantissa + b * product_per_batch + cell);
    const auto packeds = LoadVector<kVec>(packed + b * product_per_batch + cell);
    const auto values = LoadVector<kVec>(data + b * data_per_batch + element);
    Vector<T, kVec> gradient;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Product<C> product{mantissas.lane[i], packeds.lane[i]};
      const C others = ProductOfOthers(product, static_cast<C>(values.lane[i]));
      gradient.lane[i] = static_cast<T>(static_cast<C>(d_values.lane[i]) * others);
    }
    return gradient;
  }
};

}  // namespace

int64_t ProductScratchBytes(const Problem& problem, int64_t element_bytes, bool indices_are_sorted) {
  if (problem.HasNoResult()) return 0;
  const int64_t state_bytes = StateBytes(element_bytes);
  return ReduceScratchBytes(problem, ChooseWay(problem, element_bytes, state_bytes, indices_are_sorted), element_bytes,
                            state_bytes);
}

cudaError_t LaunchProduct(const ProductArguments& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  if (problem.HasNoResult()) return cudaSuccess;
  cudaError_t error = cudaErrorInvalidValue;
  DispatchWrapping(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    const Way way = ChooseWay(problem, sizeof(T), StateBytes(sizeof(T)), arguments.indices_are_sorted);
    if (!SegmentsFit(problem.segments) || (way == Way::kOrderTiles && !OrderFits(problem)) ||
        arguments.scratch_bytes < ReduceScratchBytes(problem, way, sizeof(T), StateBytes(sizeof(T)))) {
      return;
    }
    const typename ProductReduction<T>::Outputs outputs{static_cast<T*>(arguments.output),
                                                        static_cast<C*>(arguments.mantissa), arguments.packed};
    const Reducer<ProductReduction<T>> reducer{problem,
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

cudaError_t LaunchProductBackward(const ProductBackwardArguments& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  cudaError_t error = cudaErrorInvalidValue;
  DispatchFloating(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t cells = problem.segments * problem.features;
    const ProductGradient<T> function{static_cast<const T*>(arguments.d_output),
                                      static_cast<const ComputeType<T>*>(arguments.mantissa),
                                      arguments.packed,
                                      static_cast<const T*>(arguments.data),
                                      arguments.d_output_is_shared ? 0 : cells,
                                      arguments.product_is_shared ? 0 : cells,
                                      problem.data_is_shared ? 0 : problem.rows * problem.features,
                                      problem.features};
    error = LaunchMapRows(problem, arguments.segment_ids, arguments.ids_are_64_bit, function,
                          static_cast<T*>(arguments.d_data), stream);
  });
  return error;
}

}  // namespace jax_baracuda::segment
