// Calls of segment_sum and segment_mean, also of rows of 16 and 32 bits that are accumulated in float64.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// Calls body(TypeTag<T>{}) for a type of rows that may be accumulated in float64; returns false, and calls nothing, for
// any other.
template <typename Body>
bool DispatchBelowFloat64(ElementType type, Body&& body) {
  return type != ElementType::kFloat64 && DispatchFloating(type, [&](auto tag) {
           if constexpr (sizeof(typename decltype(tag)::type) < 8) body(tag);
         });
}

struct SumCall : SegmentCall {
  bool is_mean = false;
  bool in_float64 = false;
  const void* data = nullptr;
  void* output = nullptr;
  int32_t* count = nullptr;  // with is_mean: [batch, segments]

  // Means return counts even without features.
  bool HasCounts() const { return is_mean && problem.batch * problem.segments > 0; }

  bool HasKernel() const {
    const auto nothing = [](auto) {};
    return in_float64 ? DispatchBelowFloat64(type, nothing)
           : is_mean  ? IsFloating(type)
                      : DispatchWrapping(type, nothing);
  }
  static std::vector<const char*> Strategies(bool is_mean, bool in_float64);
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
