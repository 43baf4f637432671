// What the CUDA kernels of the segment reductions share: vectors, ids, and how features are dealt to threads.
#pragma once

#include <cstdint>

#include "ffi/segment/segment.h"

namespace jax_baracuda::segment {

// The segment of a row whose id is out of range. Segments are 32-bit in the kernels; launchers refuse more of them.
inline constexpr uint32_t kDropped = 0xffffffffu;

inline bool SegmentsFit(int64_t segments) { return segments < static_cast<int64_t>(kDropped); }

JB_HOST_DEVICE int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int VectorAlignment(int bytes) { return bytes < 16 ? bytes : 16; }

template <typename T, int kCount>
struct alignas(VectorAlignment(sizeof(T) * kCount)) Vector {
  T lane[kCount];
};

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = unsigned char;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned int;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

// A vector as one word. Vectors of narrow elements that wait in registers do so as words: else the compiler takes them
// apart at once.
template <typename T, int kCount>
using Packed = typename WordOf<sizeof(Vector<T, kCount>)>::type;

template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> Unpack(const Packed<T, kCount>& word) {
  Vector<T, kCount> vector;
  memcpy(&vector, &word, sizeof(word));
  return vector;
}

// For bytes that are read or written once: they should not push out of L2 what is read again.
template <typename T, int kCount>
__device__ __forceinline__ Packed<T, kCount> LoadPackedStreaming(const T* address) {
  return __ldcs(reinterpret_cast<const Packed<T, kCount>*>(address));
}

template <typename T, int kCount>
__device__ __forceinline__ Packed<T, kCount> LoadPacked(const T* address) {
  return *reinterpret_cast<const Packed<T, kCount>*>(address);
}

template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> LoadStreaming(const T* address) {
  return Unpack<T, kCount>(LoadPackedStreaming<T, kCount>(address));
}

template <typename T, int kCount>
__device__ __forceinline__ void StoreStreaming(T* address, const Vector<T, kCount>& vector) {
  using Word = typename WordOf<sizeof(Vector<T, kCount>)>::type;
  Word word;
  memcpy(&word, &vector, sizeof(word));
  __stcs(reinterpret_cast<Word*>(address), word);
}

template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> LoadVector(const T* address) {
  return *reinterpret_cast<const Vector<T, kCount>*>(address);
}

// Narrow elements as one word: else the compiler stores them by 4 bytes.
template <typename T, int kCount>
__device__ __forceinline__ void StoreVector(T* address, const Vector<T, kCount>& vector) {
  if constexpr (sizeof(T) < 4) {
    Packed<T, kCount> word;
    memcpy(&word, &vector, sizeof(word));
    __stwb(reinterpret_cast<Packed<T, kCount>*>(address), word);
  } else {
    *reinterpret_cast<Vector<T, kCount>*>(address) = vector;
  }
}

// The elements as they are computed with; half of a word of bfloat16 takes one instruction.
template <typename T, int kCount>
__device__ __forceinline__ Vector<ComputeType<T>, kCount> Widen(const Vector<T, kCount>& vector) {
  Vector<ComputeType<T>, kCount> wide;
  if constexpr (std::is_same_v<T, BFloat16> && kCount % 2 == 0) {
    uint32_t words[kCount / 2];
    memcpy(words, &vector, sizeof(words));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      wide.lane[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) wide.lane[i] = static_cast<ComputeType<T>>(vector.lane[i]);
  }
  return wide;
}

// In words, so that narrow elements stay packed in registers.
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

struct SegmentIds {
  const void* ids;
  bool are_64_bit;
  int64_t segments;

  __device__ __forceinline__ int64_t Id(int64_t index) const {
    return are_64_bit ? __ldg(static_cast<const long long*>(ids) + index)
                      : static_cast<int64_t>(__ldg(static_cast<const int*>(ids) + index));
  }

  // The segment of the row whose id has this index, or kDropped.
  __device__ __forceinline__ uint32_t operator[](int64_t index) const { return Segment(Id(index)); }

  // Calls take(i, segment) for the rows index + i, with i below kCount; what lies past `count` is not read.
  template <int kCount, typename Take>
  __device__ __forceinline__ void LoadRun(int64_t index, int count, Take&& take) const {
    const int* address = static_cast<const int*>(ids) + index;
    if (kCount % 4 == 0 && count == kCount && !are_64_bit && reinterpret_cast<uintptr_t>(address) % 16 == 0) {
#pragma unroll
      for (int i = 0; i + 3 < kCount; i += 4) {
        const Vector<int, 4> run = LoadStreaming<int, 4>(address + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) take(i + j, Segment(run.lane[j]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) take(i, (*this)[index + min(i, count - 1)]);
    }
  }

  __device__ __forceinline__ uint32_t Segment(int64_t id) const {
    return static_cast<uint64_t>(id) < static_cast<uint64_t>(segments) ? static_cast<uint32_t>(id) : kDropped;
  }
};

// How the features of a row are dealt out to threads: `lanes` neighbouring threads take one vector each; a row wider
// than that is cut into `columns` blocks of features.
struct FeatureLanes {
  int lanes;
  int columns;
};

inline FeatureLanes DealFeatures(int64_t vectors, int most_lanes) {
  const int64_t columns = CeilDivide(vectors, most_lanes);
  // Even columns, so that no column is left with a few features.
  return {static_cast<int>(CeilDivide(vectors, columns)), static_cast<int>(columns)};
}

// The bytes of the widest vector that a thread takes of a row: 8 elements at most, which stay packed in registers.
constexpr int WidestVectorBytes(int element_bytes) { return element_bytes == 1 ? 4 : 16; }

// The widest vector, in elements, that divides every row and so stays aligned in each of them.
inline int RowVector(int64_t features, int64_t element_bytes) {
  for (const int64_t bytes : {WidestVectorBytes(static_cast<int>(element_bytes)), 4}) {
    if (bytes > element_bytes && features * element_bytes % bytes == 0) return static_cast<int>(bytes / element_bytes);
  }
  return 1;
}

// Calls body(std::integral_constant<int, n>{}) for n = RowVector(features, sizeof(T)).
template <typename T, typename Body>
auto DispatchRowVector(int64_t features, Body&& body) {
  constexpr int kWidest = WidestVectorBytes(sizeof(T)) / static_cast<int>(sizeof(T));
  constexpr int kWord = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  const int vector = RowVector(features, sizeof(T));
  if (vector == kWidest) return body(std::integral_constant<int, kWidest>{});
  if constexpr (kWord > 1 && kWord < kWidest) {
    if (vector == kWord) return body(std::integral_constant<int, kWord>{});
  }
  return body(std::integral_constant<int, 1>{});
}

}  // namespace jax_baracuda::segment
