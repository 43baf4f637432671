// The element types that kernels are instantiated for, and the dispatch from a run-time type to a C++ type.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define JB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JB_HOST_DEVICE inline
#endif

namespace jax_baracuda {

enum class ElementType : int32_t {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kUnsupported,
};

#ifdef __CUDACC__
using Float16 = __half;
using BFloat16 = __nv_bfloat16;
#else
using Float16 = _Float16;

// bfloat16 on the host: the upper half of a float32, computed with in float32.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;

  // Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
  explicit BFloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? static_cast<uint16_t>((word >> 16) | 0x0040u)
                  : static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }

  operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
};
#endif

// What a value of type T is computed with: float for the 16-bit floating types, T itself otherwise.
template <typename T>
struct ComputeTypeOf {
  using type = T;
};
template <>
struct ComputeTypeOf<Float16> {
  using type = float;
};
template <>
struct ComputeTypeOf<BFloat16> {
  using type = float;
};
template <typename T>
using ComputeType = typename ComputeTypeOf<T>::type;

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls `body(TypeTag<T>{})` for a floating element type; returns false, and calls nothing, for any other.
template <typename Body>
bool DispatchFloating(ElementType type, Body&& body) {
  switch (type) {
    case ElementType::kFloat16:
      return body(TypeTag<Float16>{}), true;
    case ElementType::kBFloat16:
      return body(TypeTag<BFloat16>{}), true;
    case ElementType::kFloat32:
      return body(TypeTag<float>{}), true;
    case ElementType::kFloat64:
      return body(TypeTag<double>{}), true;
    default:
      return false;
  }
}

// As DispatchFloating, for bool (as uint8_t, whose order it shares), integers and floating types.
template <typename Body>
bool DispatchOrdered(ElementType type, Body&& body) {
  switch (type) {
    case ElementType::kBool:
    case ElementType::kUInt8:
      return body(TypeTag<uint8_t>{}), true;
    case ElementType::kUInt16:
      return body(TypeTag<uint16_t>{}), true;
    case ElementType::kUInt32:
      return body(TypeTag<uint32_t>{}), true;
    case ElementType::kUInt64:
      return body(TypeTag<uint64_t>{}), true;
    case ElementType::kInt8:
      return body(TypeTag<int8_t>{}), true;
    case ElementType::kInt16:
      return body(TypeTag<int16_t>{}), true;
    case ElementType::kInt32:
      return body(TypeTag<int32_t>{}), true;
    case ElementType::kInt64:
      return body(TypeTag<int64_t>{}), true;
    default:
      return DispatchFloating(type, body);
  }
}

}  // namespace jax_baracuda
