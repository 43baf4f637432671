// Products as reductions in registers (see engine/reduction.cuh).
#pragma once

#include <cstdint>

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/reduction.cuh"
#include "ffi/segment/product/arithmetic.h"

namespace jax_baracuda::segment {

// Whether a number is neither zero, subnormal, infinite nor NaN.
template <typename C>
__device__ __forceinline__ bool IsNormal(C value) {
  // The bits of the smallest normal number, times 2.
  constexpr BitsOf<C> kMin = BitsOf<C>{1} << (FloatingFormat<C>::kMantissaBits + 1);
  return static_cast<BitsOf<C>>((BitCast<BitsOf<C>>(value) << 1) + kMin) >= 2 * kMin;
}

template <typename T>
struct ProductOutputs {
  T* output;
  ComputeType<T>* mantissa;  // with `packed`, the residual of a floating product; or nullptr
  int32_t* packed;
};

// The product of floating numbers, and its residual. A row costs one multiplication per element as long as the
// mantissas stay normal.
template <typename T>
struct FloatingProductReduction {
  using Element = T;
  static constexpr int kRowsInFlight = 4;
  static constexpr int kTileBlocks = 6;
  using C = ComputeType<T>;
  using Outputs = ProductOutputs<T>;

  // The upper part of Product::packed, as narrow as 2^31 rows allow, so that two accumulators per thread fit in shared
  // memory.
  using High = std::conditional_t<sizeof(C) == 4, int16_t, int32_t>;

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(C) * kCount)) Accumulator {
    Vector<C, kCount> mantissa;
    Vector<uint32_t, kCount> packed_low;
    Vector<High, kCount> packed_high;

    __device__ __forceinline__ void Start() {
#pragma unroll
      for (int i = 0; i < kCount; ++i) Set(i, Product<C>{});
    }

    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, const Outputs&) {
      const Vector<C, kCount> wide = Widen(values);
      if (!Multiply(wide)) *this = AddAny(*this, wide);
    }

    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
      if (!(other.IsMantissaAlone() && Multiply(other.mantissa))) *this = MergeAny(*this, other);
    }

    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      const int64_t cell = segment * features + feature;
      Vector<T, kCount> result;
      const bool is_mantissa_alone = IsMantissaAlone();
      if (is_mantissa_alone) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) result.lane[i] = static_cast<T>(mantissa.lane[i]);
      } else {
        result = ValuesOfAny(*this);
      }
      StoreVector(outputs.output + cell, result);
      if (outputs.mantissa == nullptr) return;
      if (is_mantissa_alone) {
        StoreResiduals(outputs, cell, [&](int i) { return Residual<C>::Of(mantissa.lane[i], 0); });
      } else {
        StoreResidualsOfAny(*this, outputs, cell);
      }
    }

   private:
    // Multiplies the mantissas and returns true, unless a product would not be normal.
    __device__ __forceinline__ bool Multiply(const Vector<C, kCount>& factors) {
      Vector<C, kCount> products;
      bool are_normal = true;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        products.lane[i] = mantissa.lane[i] * factors.lane[i];
        are_normal &= IsNormal(products.lane[i]);
      }
      if (are_normal) mantissa = products;
      return are_normal;
    }

    __device__ __forceinline__ bool IsMantissaAlone() const {
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) bits |= packed_low.lane[i] | static_cast<uint32_t>(packed_high.lane[i]);
      return bits == 0;
    }

    // Out of line, so that the loops over rows fit in the instruction cache.
    __device__ __noinline__ static Accumulator AddAny(Accumulator cells, Vector<C, kCount> values) {
      for (int i = 0; i < kCount; ++i) cells.Set(i, ProductTimes(cells.At(i), values.lane[i]));
      return cells;
    }
    __device__ __noinline__ static Accumulator MergeAny(Accumulator cells, Accumulator others) {
      for (int i = 0; i < kCount; ++i) cells.Set(i, ProductOfBoth(cells.At(i), others.At(i)));
      return cells;
    }
    __device__ __noinline__ static void StoreResidualsOfAny(Accumulator cells, const Outputs& outputs, int64_t cell) {
      StoreResiduals(outputs, cell, [&](int i) { return Residual<C>::Of(cells.mantissa.lane[i], cells.At(i).packed); });
    }
    template <typename ResidualOf>
    __device__ __forceinline__ static void StoreResiduals(const Outputs& outputs, int64_t cell,
                                                          const ResidualOf& residual_of) {
      Vector<C, kCount> mantissas;
      Vector<int32_t, kCount> packed;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const Residual<C> residual = residual_of(i);
        mantissas.lane[i] = residual.mantissa;
        packed.lane[i] = residual.packed;
      }
      StoreVector(outputs.mantissa + cell, mantissas);
      StoreVector(outputs.packed + cell, packed);
    }
    __device__ __noinline__ static Vector<T, kCount> ValuesOfAny(Accumulator cells) {
      Vector<T, kCount> values;
      for (int i = 0; i < kCount; ++i) values.lane[i] = static_cast<T>(ValueOf(cells.At(i)));
      return values;
    }

    __device__ __forceinline__ Product<C> At(int i) const {
      return {mantissa.lane[i], packed_high.lane[i] * (int64_t{1} << 32) + packed_low.lane[i]};
    }
    __device__ __forceinline__ void Set(int i, const Product<C>& product) {
      mantissa.lane[i] = product.mantissa;
      packed_low.lane[i] = static_cast<uint32_t>(product.packed);
      packed_high.lane[i] = static_cast<High>(product.packed >> 32);
    }
  };
};

// The product of integers, which wraps.
template <typename T>
struct IntegerProductReduction {
  using Element = T;
  static constexpr int kRowsInFlight = 4;
  static constexpr int kTileBlocks = 6;
  using Outputs = ProductOutputs<T>;

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(T) * kCount)) Accumulator {
    Vector<T, kCount> product;

    __device__ __forceinline__ void Start() { product = Repeat<kCount>(T{1}); }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) product.lane[i] *= values.lane[i];
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs& outputs) {
      Add(other.product, 0, outputs);
    }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      StoreVector(outputs.output + segment * features + feature, product);
    }
  };
};

template <typename T>
using ProductReduction = std::conditional_t<kIsFloating<T>, FloatingProductReduction<T>, IntegerProductReduction<T>>;

}  // namespace jax_baracuda::segment
