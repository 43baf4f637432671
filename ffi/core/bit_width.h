// Sizes of elements in memory. XLA packs types narrower than a byte: the first element of a byte is in its lowest bits,
// and rows are not padded.
#pragma once

#include <cstdint>

#include "ffi/core/integers.h"
#include "xla/ffi/api/c_api.h"

namespace jax_baracuda {

// 0 for types not listed here.
inline int64_t BitWidth(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_S2:
    case XLA_FFI_DataType_U2:
      return 2;
    case XLA_FFI_DataType_S4:
    case XLA_FFI_DataType_U4:
    case XLA_FFI_DataType_F4E2M1FN:
      return 4;
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E3M4:
    case XLA_FFI_DataType_F8E4M3:
    case XLA_FFI_DataType_F8E4M3B11FNUZ:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E4M3FNUZ:
    case XLA_FFI_DataType_F8E5M2:
    case XLA_FFI_DataType_F8E5M2FNUZ:
    case XLA_FFI_DataType_F8E8M0FNU:
      return 8;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 16;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 32;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 64;
    case XLA_FFI_DataType_C128:
      return 128;
    default:
      return 0;
  }
}

// Bytes per element; 0 for types narrower than a byte and types not listed in BitWidth.
inline int WholeByteWidth(XLA_FFI_DataType type) {
  const int64_t bits = BitWidth(type);
  return bits % 8 == 0 ? static_cast<int>(bits / 8) : 0;
}

// Bytes of `count` consecutive elements.
inline int64_t PackedBytes(int64_t count, int64_t bit_width) {
  return bit_width % 8 == 0 ? count * (bit_width / 8) : CeilDivide(count * bit_width, 8);
}

}  // namespace jax_baracuda
