// A call of write_rows, for both back ends: the place of each row, and the conversion of its numbers.
//
// A pool is [batch, layers, outer, slots, inner] elements, its rows are [batch, rows, outer, inner]. The elements of a
// row that are neighbours in the pool, too, are the inner ones.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/core/bit_cast.h"
#include "ffi/core/copy.h"
#include "ffi/core/element_type.h"
#include "ffi/core/executor.h"
#include "ffi/core/host_device.h"

namespace jax_baracuda::write_rows {

// ---- Numbers that kernels convert. All round to nearest, ties to even.

// Values that round to more than 448 become NaN, because the type has no infinity.
struct Float8E4M3 {
  uint8_t bits;

  JB_ALWAYS_INLINE static bool Overflows(uint32_t magnitude) { return magnitude > 0x43e80000u; }  // 464, midway to 480

  JB_ALWAYS_INLINE static Float8E4M3 Of(float value) {
    const uint32_t word = BitCast<uint32_t>(value), magnitude = word & 0x7fffffffu;
    // In [2^14, 2^15) one ulp of float32 is the smallest subnormal, so this addition rounds to subnormals.
    const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude) + 0x1p14f) - 0x46800000u;
    const uint32_t normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - (120u << 23)) >> 20;
    const uint32_t rounded = Overflows(magnitude) ? 0x7fu : magnitude < 0x3c800000u ? subnormal : normal;
    return {static_cast<uint8_t>((word >> 24 & 0x80u) | rounded)};
  }
};

struct Float8E5M2 {
  uint8_t bits;

  JB_ALWAYS_INLINE static bool Overflows(uint32_t magnitude) {
    return magnitude >= 0x47700000u;
  }  // 61440, midway to 2^16

  JB_ALWAYS_INLINE static Float8E5M2 Of(float value) {
    const uint32_t word = BitCast<uint32_t>(value), magnitude = word & 0x7fffffffu;
    const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude) + 0x1p7f) - 0x43000000u;
    const uint32_t normal = (magnitude + 0xfffffu + ((magnitude >> 21) & 1u) - (112u << 23)) >> 21;
    const uint32_t rounded = magnitude > 0x7f800000u   ? 0x7eu
                             : Overflows(magnitude)    ? 0x7cu
                             : magnitude < 0x38800000u ? subnormal
                                                       : normal;
    return {static_cast<uint8_t>((word >> 24 & 0x80u) | rounded)};
  }
};

// Values out of range become the nearest integer in range, and NaN becomes 0.
struct Int8 {
  int8_t value;

  JB_ALWAYS_INLINE static Int8 Of(float value) {
    const float number = value == value ? value : 0.0f;
    const float in_range = number < -128.0f ? -128.0f : number > 127.0f ? 127.0f : number;
    // In [2^23, 2^24) one ulp of float32 is 1, so this addition rounds to integers; the lowest bits hold them.
    return {static_cast<int8_t>(BitCast<uint32_t>(in_range + 0x1.8p23f) & 0xffu)};
  }
};

// Calls body(TypeTag<T>{}) for a type of rows that kernels convert; returns false, and calls nothing, for any other.
template <typename Body>
JB_ALWAYS_INLINE bool DispatchRows(ElementType type, const Body& body) {
  switch (type) {
    case ElementType::kFloat32:
      return body(TypeTag<float>{}), true;
    case ElementType::kFloat16:
      return body(TypeTag<Float16>{}), true;
    case ElementType::kBFloat16:
      return body(TypeTag<BFloat16>{}), true;
    default:
      return false;
  }
}

// The same for a type of pools.
template <typename Body>
JB_ALWAYS_INLINE bool DispatchPool(ElementType type, const Body& body) {
  switch (type) {
    case ElementType::kFloat8E4M3:
      return body(TypeTag<Float8E4M3>{}), true;
    case ElementType::kFloat8E5M2:
      return body(TypeTag<Float8E5M2>{}), true;
    case ElementType::kInt8:
      return body(TypeTag<Int8>{}), true;
    default:
      return DispatchRows(type, body);
  }
}

// ---- The call.

struct Pool {
  void* dest = nullptr;
  const void* rows = nullptr;
  const float* scales = nullptr;  // the divisors of the numbers; nullptr: 1
  bool rows_are_shared = false;   // by the batch
  bool scales_are_shared = false;
  bool converts = false;  // otherwise bits are copied
  int32_t number = 0;     // among the pools of the call
  ElementType from = ElementType::kUnsupported, to = ElementType::kUnsupported;
  int32_t row_bytes_of_element = 0, pool_bytes_of_element = 0;
  int64_t outer = 1, inner = 1;
  int64_t num_scales = 1;  // of a row; each divides as many neighbours

  int64_t row_elements() const { return outer * inner; }
};

struct Call {
  int64_t batch = 1, layers = 1, slots = 0, rows = 0;
  const int32_t* slot_of_row = nullptr;
  const int32_t* layer = nullptr;  // nullptr: the only one
  bool slot_of_row_is_shared = false, layer_is_shared = false;
  bool has_unique_slots = false;  // no two rows have the same slot
  std::vector<Copy> copies;
  std::vector<Pool> pools;  // those whose rows have elements

  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::write_rows
