// Neighbouring elements that a thread loads, computes and stores together.
//
// Prefetched elements stay packed in words until they are used. Compilers would unpack a vector of narrow elements
// right after its load, and so stall there.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/core/alignment.h"
#include "ffi/core/element_type.h"

namespace jax_baracuda {

constexpr int VectorAlignment(int bytes) { return bytes < kVectorBytes ? bytes : kVectorBytes; }

template <typename T, int kCount>
struct alignas(VectorAlignment(sizeof(T) * kCount)) Vector {
  T lane[kCount];
};

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

// A vector as one word.
template <typename T, int kCount>
using Packed = typename WordOf<sizeof(T) * kCount>::type;

template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> Unpack(const Packed<T, kCount>& word) {
  Vector<T, kCount> vector;
  memcpy(&vector, &word, sizeof(word));
  return vector;
}

template <typename T, int kCount>
__device__ __forceinline__ Packed<T, kCount> Pack(const Vector<T, kCount>& vector) {
  Packed<T, kCount> word;
  memcpy(&word, &vector, sizeof(word));
  return word;
}

// ---- Loads. Streaming loads are for bytes that are read once: they should not evict reused data from L2.

template <int kCount, typename T>
__device__ __forceinline__ Packed<T, kCount> LoadPacked(const T* address) {
  return *reinterpret_cast<const Packed<T, kCount>*>(address);
}

template <int kCount, typename T>
__device__ __forceinline__ Packed<T, kCount> LoadPackedStreaming(const T* address) {
  return __ldcs(reinterpret_cast<const Packed<T, kCount>*>(address));
}

template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> LoadVector(const T* address) {
  return *reinterpret_cast<const Vector<T, kCount>*>(address);
}

template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> LoadStreaming(const T* address) {
  return Unpack<T, kCount>(LoadPackedStreaming<kCount>(address));
}

// ---- Stores. Words use intrinsics, because compilers split a plain store of a word assembled from its elements.

template <typename T, int kCount>
__device__ __forceinline__ void StorePacked(T* address, const Packed<T, kCount>& word) {
  __stcg(reinterpret_cast<Packed<T, kCount>*>(address), word);
}

template <typename T, int kCount>
__device__ __forceinline__ void StoreStreaming(T* address, const Vector<T, kCount>& vector) {
  __stcs(reinterpret_cast<Packed<T, kCount>*>(address), Pack(vector));
}

template <typename T, int kCount>
__device__ __forceinline__ void StoreVector(T* address, const Vector<T, kCount>& vector) {
  constexpr int kStored = sizeof(T) * kCount > kVectorBytes ? kVectorBytes / sizeof(T) : kCount;  // at once
#pragma unroll
  for (int first = 0; first < kCount; first += kStored) {
    Packed<T, kStored> word;
    memcpy(&word, &vector.lane[first], sizeof(word));
    __stwb(reinterpret_cast<Packed<T, kStored>*>(address + first), word);
  }
}

// ---- Conversions from and to ComputeType.

// Unpacks 16-bit floats in pairs: one instruction per element.
template <typename T, int kCount>
__device__ __forceinline__ void WidenLanes(const void* vector, ComputeType<T>* values) {
  if constexpr (sizeof(T) == 2 && !std::is_same_v<T, ComputeType<T>> && kCount % 2 == 0) {
    uint32_t pairs[kCount / 2];
    memcpy(pairs, vector, sizeof(pairs));
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if constexpr (std::is_same_v<T, BFloat16>) {
        values[2 * i] = __uint_as_float(pairs[i] << 16);
        values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
      } else {
        __half2 pair;
        memcpy(&pair, &pairs[i], sizeof(pair));
        values[2 * i] = __low2float(pair);
        values[2 * i + 1] = __high2float(pair);
      }
    }
  } else {
    T lanes[kCount];
    memcpy(lanes, vector, sizeof(lanes));
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = static_cast<ComputeType<T>>(lanes[i]);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void Widen(const Packed<T, kCount>& word, ComputeType<T>* values) {
  WidenLanes<T, kCount>(&word, values);
}

template <typename T, int kCount>
__device__ __forceinline__ Vector<ComputeType<T>, kCount> Widen(const Vector<T, kCount>& vector) {
  Vector<ComputeType<T>, kCount> wide;
  WidenLanes<T, kCount>(&vector, wide.lane);
  return wide;
}

// Rounds to nearest even. 16-bit values are converted in pairs: one instruction per pair.
template <typename T, int kCount>
__device__ __forceinline__ Packed<T, kCount> Narrow(const ComputeType<T>* values) {
  Packed<T, kCount> word;
  if constexpr (std::is_same_v<T, BFloat16> && kCount % 2 == 0) {
    __nv_bfloat162 pairs[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    memcpy(&word, pairs, sizeof(word));
  } else if constexpr (std::is_same_v<T, Float16> && kCount % 2 == 0) {
    __half2 pairs[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) pairs[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
    memcpy(&word, pairs, sizeof(word));
  } else {
    T lanes[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) lanes[i] = static_cast<T>(values[i]);
    memcpy(&word, lanes, sizeof(word));
  }
  return word;
}

template <typename T, int kCount>
__device__ __forceinline__ void StoreNarrow(T* address, const ComputeType<T>* values) {
  StorePacked<T, kCount>(address, Narrow<T, kCount>(values));
}

// A vector filled with one value. It is built from words, so that narrow elements stay packed.
template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> Repeat(T value) {
  Vector<T, kCount> vector;
  if constexpr (sizeof(T) < 4 && sizeof(T) * kCount % 4 == 0) {
    uint32_t word = 0;
    memcpy(&word, &value, sizeof(T));
    word *= sizeof(T) == 1 ? 0x01010101u : 0x00010001u;
    uint32_t words[sizeof(T) * kCount / 4];
#pragma unroll
    for (uint32_t& w : words) w = word;
    memcpy(&vector, words, sizeof(vector));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.lane[i] = value;
  }
  return vector;
}

}  // namespace jax_baracuda
