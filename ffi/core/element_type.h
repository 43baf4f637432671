// The element types that kernels are instantiated for, and the dispatch from a run-time type to a C++ type.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "ffi/core/bit_cast.h"
#include "ffi/core/host_device.h"

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
  kFloat8E4M3,
  kFloat8E5M2,
  kUnsupported,
};

#ifdef __CUDACC__
using Float16 = __half;
using BFloat16 = __nv_bfloat16;
#else
// float16 and bfloat16 on the host; arithmetic is in float32. The conversions vectorise on every instruction set. They
// are correct even if float32 subnormals are flushed to zero, as in XLA's threads.
struct Float16 {
  uint16_t bits;

  Float16() = default;

  // Rounds to nearest, ties to even; a NaN becomes a quiet NaN of the same sign.
  explicit Float16(float value) {
    const uint32_t word = BitCast<uint32_t>(value);
    const uint32_t sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    // In [0.5, 1) one ulp of float32 is the smallest float16 subnormal, so this addition rounds to float16 subnormals.
    const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    const uint32_t rounded = magnitude > 0x7f800000u    ? 0x7e00u
                             : magnitude >= 0x477ff000u ? 0x7c00u
                             : magnitude < 0x38800000u  ? subnormal
                                                        : normal;
    bits = static_cast<uint16_t>(sign | rounded);
  }

  operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    const uint32_t exponent_offset = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23;  // infinity and NaN; normal
    const uint32_t normal = (magnitude << 13) + exponent_offset;
    const uint32_t subnormal = BitCast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    return BitCast<float>(sign | (magnitude < 0x0400u ? subnormal : normal));
  }
};

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;

  // Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
  explicit BFloat16(float value) {
    const uint32_t word = BitCast<uint32_t>(value);
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? static_cast<uint16_t>((word >> 16) | 0x0040u)
                  : static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }

  operator float() const { return BitCast<float>(static_cast<uint32_t>(bits) << 16); }
};
#endif

// The type for arithmetic on a T: float for the 16-bit floating types, T itself otherwise.
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

inline bool IsFloating(ElementType type) {
  return DispatchFloating(type, [](auto) {});
}

// DispatchFloating plus integers of 32 and 64 bits. Unsigned integers are dispatched as signed: for kernels that invert
// a bit of each value to get the unsigned order.
template <typename Body>
bool DispatchWide(ElementType type, Body&& body) {
  switch (type) {
    case ElementType::kUInt32:
    case ElementType::kInt32:
      return body(TypeTag<int32_t>{}), true;
    case ElementType::kUInt64:
    case ElementType::kInt64:
      return body(TypeTag<int64_t>{}), true;
    default:
      return DispatchFloating(type, body);
  }
}

// The same, but integers are dispatched as unsigned: for sums and products that wrap, where the sign makes no
// difference.
template <typename Body>
bool DispatchWrapping(ElementType type, Body&& body) {
  switch (type) {
    case ElementType::kUInt32:
    case ElementType::kInt32:
      return body(TypeTag<uint32_t>{}), true;
    case ElementType::kUInt64:
    case ElementType::kInt64:
      return body(TypeTag<uint64_t>{}), true;
    default:
      return DispatchFloating(type, body);
  }
}

// DispatchWide plus bool and integers of 8 and 16 bits.
template <typename Body>
bool DispatchOrdered(ElementType type, Body&& body) {
  switch (type) {
    case ElementType::kBool:
    case ElementType::kUInt8:
    case ElementType::kInt8:
      return body(TypeTag<int8_t>{}), true;
    case ElementType::kUInt16:
    case ElementType::kInt16:
      return body(TypeTag<int16_t>{}), true;
    default:
      return DispatchWide(type, body);
  }
}

// Makes a function above an argument of another function.
#define JB_DISPATCH(function) [](auto type, auto&& body) { return function(type, body); }

// The result of body(TypeTag<T>{}) for the T that dispatch(type, body) finds; `otherwise` if it finds none.
template <typename Result, typename Type, typename Dispatch, typename Body>
Result DispatchOr(Result otherwise, Type type, const Dispatch& dispatch, const Body& body) {
  dispatch(type, [&](auto tag) { otherwise = body(tag); });
  return otherwise;
}

// 0 for a type that no kernel supports.
inline int64_t ElementBytes(ElementType type) {
  int64_t bytes = 0;
  DispatchOrdered(type, [&](auto tag) { bytes = sizeof(typename decltype(tag)::type); });
  return bytes;
}

// The bytes of the types that kernels accumulate in: 8 for types of 64 bits, otherwise 4.
inline int64_t AccumulatorBytes(ElementType type) { return ElementBytes(type) == 8 ? 8 : 4; }

}  // namespace jax_baracuda
