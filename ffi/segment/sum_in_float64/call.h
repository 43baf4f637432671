// Calls of segment_sum_in_float64 and segment_mean_in_float64: sums and means of rows of 16 and 32 bits that are
// accumulated in double.
#pragma once

#include "ffi/segment/sum/call.h"

namespace jax_baracuda::segment {

// Calls body(TypeTag<T>{}) for a type of these rows; returns false, and calls nothing, for any other.
template <typename Body>
bool DispatchBelowFloat64(ElementType type, Body&& body) {
  return type != ElementType::kFloat64 && DispatchFloating(type, [&](auto tag) {
           if constexpr (sizeof(typename decltype(tag)::type) < 8) body(tag);
         });
}

struct Float64SumCall : SumArguments {
  static constexpr const char *kSumName = "segment_sum_in_float64", *kMeanName = "segment_mean_in_float64";

  bool HasKernel() const {
    return DispatchBelowFloat64(type, [](auto) {});
  }
  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
