// Products and their gradient.

#include "ffi/segment/engine/map_rows.cuh"
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/product/call.h"
#include "ffi/segment/product/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

template <typename T>
struct ProductGradient {
  using C = ComputeType<T>;
  BatchArray<T> d_output;
  BatchArray<C> mantissa;
  const int32_t* packed;  // shared by the batch as mantissas are
  BatchArray<T> data;
  int64_t features;

  template <int kVec>
  __device__ __forceinline__ Vector<T, kVec> At(int64_t b, uint32_t segment, int64_t row, int64_t feature) const {
    const int64_t cell = segment * features + feature;
    const auto d_values = LoadVector<kVec>(d_output.Of(b) + cell);
    const auto mantissas = LoadVector<kVec>(mantissa.Of(b) + cell);
    const auto packeds = LoadVector<kVec>(packed + b * mantissa.stride + cell);
    const auto values = LoadVector<kVec>(data.Of(b) + row * features + feature);
    const Vector<C, kVec> wide = Widen(values), d_wide = Widen(d_values);
    Vector<T, kVec> gradient;
    bool are_plain = true;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Residual<C> product{mantissas.lane[i], packeds.lane[i]};
      const SignedBits<C> others = product.Exponent() - ExponentOf(wide.lane[i]);
      constexpr int kBias = FloatingFormat<C>::kExponentBias;
      are_plain &= IsNormal(wide.lane[i]) && (product.packed & kCountMask) == 0 && others > 1 - kBias && others < kBias;
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Residual<C> product{mantissas.lane[i], packeds.lane[i]};
      if (are_plain) {
        const C others = Quotient(MantissaOf(product.mantissa), MantissaOf(wide.lane[i])) *
                         PowerOfTwo<C>(product.Exponent() - ExponentOf(wide.lane[i]));
        gradient.lane[i] = static_cast<T>(d_wide.lane[i] * others);
      } else {
        gradient.lane[i] = static_cast<T>(OfOthersTimes(product, wide.lane[i], d_wide.lane[i]));
      }
    }
    return gradient;
  }

 private:
  // Out of line, so that the loops over rows fit in the instruction cache.
  __device__ __noinline__ static C OfOthersTimes(Residual<C> product, C value, C factor) {
    return product.OfOthersTimes(value, factor);
  }

  // Divides mantissas. For 16-bit types an error of 2 ulp of float does not matter.
  __device__ __forceinline__ static C Quotient(C a, C b) {
    if constexpr (sizeof(T) == 2) {
      return __fdividef(a, b);
    } else {
      return a / b;
    }
  }
};

// State bytes per cell: a mantissa and 64 bits. (Integers need less; plans were measured with PairStateBytes.)
ReducePlan PlanOf(const ProductCall& call) {
  return PlanByRule(call, IsFloating(call.type) ? AccumulatorBytes(call.type) + 8 : PairStateBytes(call.type));
}

}  // namespace

std::vector<const char*> ProductCall::Strategies() { return ReduceStrategies(); }

Plan ProductCall::MakePlan() const { return PlanOf(*this).Summary(); }

std::vector<const char*> ProductBackwardCall::Strategies() { return MapStrategies(); }

Plan ProductBackwardCall::MakePlan() const { return PlanMapRows(problem, ElementBytes(type)); }

CudaStatus ProductCall::Run(cudaStream_t stream) const {
  return LaunchFor(type, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ProductOutputs<T> outputs{static_cast<T*>(output), static_cast<ComputeType<T>*>(mantissa), packed};
    return LaunchReduction<ProductReduction<T>>(*this, PlanOf(*this), outputs, stream);
  });
}

CudaStatus ProductBackwardCall::Run(cudaStream_t stream) const {
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t cells = problem.segments * problem.features;
    const ProductGradient<T> function{{d_output, cells},
                                      {mantissa, cells},
                                      static_cast<const int32_t*>(packed.data),
                                      {data, problem.rows * problem.features},
                                      problem.features};
    return LaunchMapRows(problem, segment_ids, ids_are_64_bit, function, static_cast<T*>(d_data), stream);
  });
}

}  // namespace jax_baracuda::segment
