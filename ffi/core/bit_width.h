// Sizes of elements in memory. XLA packs types narrower than a byte: the first element of a byte is in its lowest bits,
// and rows are not padded. (ffi::ByteWidth and AnyBuffer::size_bytes count one byte for each such element.)
#pragma once

#include <cstdint>

#include "ffi/core/integers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_baracuda {

// 0 for types not listed here.
inline int64_t BitWidth(xla::ffi::DataType type) {
  using xla::ffi::DataType;
  switch (type) {
    case DataType::S2:
    case DataType::U2:
      return 2;
    case DataType::S4:
    case DataType::U4:
    case DataType::F4E2M1FN:
      return 4;
    case DataType::PRED:
    case DataType::S8:
    case DataType::U8:
    case DataType::F8E3M4:
    case DataType::F8E4M3:
    case DataType::F8E4M3B11FNUZ:
    case DataType::F8E4M3FN:
    case DataType::F8E4M3FNUZ:
    case DataType::F8E5M2:
    case DataType::F8E5M2FNUZ:
    case DataType::F8E8M0FNU:
      return 8;
    case DataType::S16:
    case DataType::U16:
    case DataType::F16:
    case DataType::BF16:
      return 16;
    case DataType::S32:
    case DataType::U32:
    case DataType::F32:
      return 32;
    case DataType::S64:
    case DataType::U64:
    case DataType::F64:
    case DataType::C64:
      return 64;
    case DataType::C128:
      return 128;
    default:
      return 0;
  }
}

// Bytes per element; 0 for types narrower than a byte and types not listed in BitWidth.
inline int WholeByteWidth(xla::ffi::DataType type) {
  const int64_t bits = BitWidth(type);
  return bits % 8 == 0 ? static_cast<int>(bits / 8) : 0;
}

// Bytes of `count` consecutive elements.
inline int64_t PackedBytes(int64_t count, int64_t bit_width) {
  return bit_width % 8 == 0 ? count * (bit_width / 8) : CeilDivide(count * bit_width, 8);
}

}  // namespace jax_baracuda
