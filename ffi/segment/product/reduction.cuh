// Products as reductions in registers (see reduction.cuh).
#pragma once

#include <cstdint>

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/reduction.cuh"
#include "ffi/segment/product/arithmetic.h"

namespace jax_baracuda::segment {

// A float or double taken apart.
template <typename C>
struct FloatingBits {
  using Format = FloatingFormat<C>;
  using Bits = BitsOf<C>;

  Bits bits;

  __device__ __forceinline__ explicit FloatingBits(C value) : bits(BitCast<Bits>(value)) {}

  // Neither zero nor subnormal, infinite or NaN.
  __device__ __forceinline__ bool IsNormal() const {
    constexpr Bits kMin = Bits{1} << (Format::kMantissaBits + 1);  // of the bits without the sign, times 2
    return static_cast<Bits>((bits << 1) + kMin) >= 2 * kMin;
  }

  // Of a normal number: value == Mantissa() * 2^Exponent(). The mantissa has the sign, and a magnitude in [1, 2).
  __device__ __forceinline__ int32_t Exponent() const {
    return (static_cast<int32_t>(bits >> Format::kMantissaBits) & Format::kExponentMask) - Format::kExponentBias;
  }
  __device__ __forceinline__ C Mantissa() const {
    constexpr Bits kField = static_cast<Bits>(Format::kExponentMask) << Format::kMantissaBits;
    constexpr Bits kOne = static_cast<Bits>(Format::kExponentBias) << Format::kMantissaBits;
    return BitCast<C>((bits & ~kField) | kOne);
  }
};

// Whether a product has nothing but ordinary members, and 2^exponent is a normal number.
template <typename C>
__device__ __forceinline__ bool IsPlain(int32_t packed, int32_t exponent) {
  constexpr int kBias = FloatingFormat<C>::kExponentBias;
  return (packed & 63) == 0 && exponent > 1 - kBias && exponent < kBias;
}

template <typename T>
struct ProductOutputs {
  T* output;
  ComputeType<T>* mantissa;  // with `packed` what the gradient of a floating product needs, or nullptr
  int32_t* packed;
};

// The product of floating numbers, and what the gradient needs. Mantissas grow with each row, by less than a factor of
// 2, until Normalize or Merge brings them back to [1, 2).
template <typename T>
struct FloatingProductReduction {
  using Element = T;
  static constexpr int kRowsInFlight = 4;
  static constexpr int kTileBlocks = 12;
  using C = ComputeType<T>;
  using Outputs = ProductOutputs<T>;

  static_assert(2 * kMaxRowsBetweenNormalize < FloatingFormat<C>::kExponentBias,
                "the product of two mantissas is finite");

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(C) * kCount)) Accumulator {
    Vector<C, kCount> mantissa;
    Vector<int32_t, kCount> packed;

    __device__ __forceinline__ void Start() {
#pragma unroll
      for (int i = 0; i < kCount; ++i) Set(i, Product<C>{});
    }

    // A row of normal numbers takes few instructions.
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, const Outputs&) {
      const Vector<C, kCount> wide = Widen(values);
      bool are_normal = true;
#pragma unroll
      for (int i = 0; i < kCount; ++i) are_normal &= FloatingBits<C>(wide.lane[i]).IsNormal();
      if (are_normal) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const FloatingBits<C> bits(wide.lane[i]);
          mantissa.lane[i] *= bits.Mantissa();
          packed.lane[i] += bits.Exponent() * 64;
        }
      } else {
        *this = AddAny(*this, values);
      }
    }

    __device__ __forceinline__ void Normalize() {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const FloatingBits<C> bits(mantissa.lane[i]);
        Set(i, {bits.Mantissa(), AddExponent(packed.lane[i], bits.Exponent())});
      }
    }

    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        mantissa.lane[i] *= other.mantissa.lane[i];
        packed.lane[i] = AddExponent(packed.lane[i], other.packed.lane[i] >> 6);
        for (const ProductClass kind : {kZero, kInfinity, kNan}) {
          packed.lane[i] = AddCount(packed.lane[i], kind, CountOf(other.packed.lane[i], kind));
        }
      }
      Normalize();
    }

    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      const int64_t cell = segment * features + feature;
      Accumulator normalized = *this;
      normalized.Normalize();
      bool are_plain = true;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        are_plain &= IsPlain<C>(normalized.packed.lane[i], normalized.packed.lane[i] >> 6);
      }
      Vector<T, kCount> result;
      if (are_plain) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          result.lane[i] = static_cast<T>(normalized.mantissa.lane[i] * PowerOfTwo<C>(normalized.packed.lane[i] >> 6));
        }
      } else {
        result = ValuesOfAny(normalized);
      }
      StoreVector(outputs.output + cell, result);
      if (outputs.mantissa != nullptr) {
        StoreVector(outputs.mantissa + cell, normalized.mantissa);
        StoreVector(outputs.packed + cell, normalized.packed);
      }
    }

   private:
    // Out of line, for the loops over rows to stay in the instruction cache.
    __device__ __noinline__ static Accumulator AddAny(Accumulator cells, Vector<T, kCount> values) {
      for (int i = 0; i < kCount; ++i) {
        Product<C> product = cells.At(i);
        MultiplyBy(product, static_cast<C>(values.lane[i]));
        cells.Set(i, product);
      }
      return cells;
    }
    __device__ __noinline__ static Vector<T, kCount> ValuesOfAny(Accumulator cells) {
      Vector<T, kCount> values;
      for (int i = 0; i < kCount; ++i) values.lane[i] = static_cast<T>(ProductValue(cells.At(i)));
      return values;
    }

    __device__ __forceinline__ Product<C> At(int i) const { return {mantissa.lane[i], packed.lane[i]}; }
    __device__ __forceinline__ void Set(int i, const Product<C>& product) {
      mantissa.lane[i] = product.mantissa;
      packed.lane[i] = product.packed;
    }
  };
};

// The product of integers, which wraps.
template <typename T>
struct IntegerProductReduction {
  using Element = T;
  static constexpr int kRowsInFlight = 4;
  static constexpr int kTileBlocks = 12;
  using Outputs = ProductOutputs<T>;

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(T) * kCount)) Accumulator {
    Vector<T, kCount> product;

    __device__ __forceinline__ void Start() { product = Repeat<kCount>(T{1}); }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) product.lane[i] *= values.lane[i];
    }
    __device__ __forceinline__ void Normalize() {}
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
