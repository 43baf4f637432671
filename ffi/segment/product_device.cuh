// Products as reductions in registers (see reduction.cuh).
#pragma once

#include <cstdint>

#include "ffi/segment/device.cuh"
#include "ffi/segment/product.h"

namespace jax_baracuda::segment {

// The product, and of floating types also what the gradient needs, where `mantissa` is not nullptr. Integers wrap.
template <typename T>
struct ProductReduction {
  using Element = T;
  static constexpr int kRowsInFlight = 4;
  static constexpr int kTileBlocks = 12;
  using C = ComputeType<T>;
  using Factor = std::conditional_t<kIsFloating<T>, Product<C>, C>;

  struct Outputs {
    T* output;
    C* mantissa;
    int32_t* packed;
  };

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(C) * kCount)) Accumulator {
    Factor product[kCount];

    __device__ __forceinline__ void Start() {
#pragma unroll
      for (Factor& p : product) {
        if constexpr (kIsFloating<T>) {
          p = Factor{};
        } else {
          p = Factor{1};
        }
      }
    }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if constexpr (kIsFloating<T>) {
          MultiplyBy(product[i], static_cast<C>(values.lane[i]));
        } else {
          product[i] *= values.lane[i];
        }
      }
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if constexpr (kIsFloating<T>) {
          MergeProduct(product[i], other.product[i]);
        } else {
          product[i] *= other.product[i];
        }
      }
    }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      const int64_t cell = segment * features + feature;
      Vector<T, kCount> result;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if constexpr (kIsFloating<T>) {
          result.lane[i] = static_cast<T>(ProductValue(product[i]));
        } else {
          result.lane[i] = product[i];
        }
      }
      StoreVector(outputs.output + cell, result);
      if constexpr (kIsFloating<T>) {
        if (outputs.mantissa != nullptr) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            outputs.mantissa[cell + i] = product[i].mantissa;
            outputs.packed[cell + i] = product[i].packed;
          }
        }
      }
    }
  };
};

}  // namespace jax_baracuda::segment
