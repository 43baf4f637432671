// What the CUDA kernels of segment_max share: vectors, ids, the exact maximum, and a cell under reduction in registers.
#pragma once

#include <cstdint>

#include "ffi/segment/segment_max.h"

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

// For bytes that are read or written once: they should not push out of L2 what is read again.
template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> LoadStreaming(const T* address) {
  using Word = typename WordOf<sizeof(Vector<T, kCount>)>::type;
  const Word word = __ldcs(reinterpret_cast<const Word*>(address));
  Vector<T, kCount> vector;
  memcpy(&vector, &word, sizeof(word));
  return vector;
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

template <typename T, int kCount>
__device__ __forceinline__ void StoreVector(T* address, const Vector<T, kCount>& vector) {
  *reinterpret_cast<Vector<T, kCount>*>(address) = vector;
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

  // The segment of the row whose id has this index, or kDropped.
  __device__ __forceinline__ uint32_t operator[](int64_t index) const {
    return Segment(are_64_bit ? __ldg(static_cast<const long long*>(ids) + index)
                              : static_cast<int64_t>(__ldg(static_cast<const int*>(ids) + index)));
  }

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

// Larger(a, b) in one instruction where the hardware has one: these propagate NaN and put +0 above -0.
template <typename T>
__device__ __forceinline__ T HardwareLarger(T a, T b) {
  return Larger(a, b);
}
template <>
__device__ __forceinline__ float HardwareLarger(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
template <>
__device__ __forceinline__ Float16 HardwareLarger(Float16 a, Float16 b) {
  return __hmax_nan(a, b);
}
template <>
__device__ __forceinline__ BFloat16 HardwareLarger(BFloat16 a, BFloat16 b) {
  return __hmax_nan(a, b);
}

// Two or four narrow values at once, in a word.
template <typename T>
__device__ __forceinline__ uint32_t PackedLarger(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    return __vmaxu4(a, b);
  } else if constexpr (std::is_same_v<T, int8_t>) {
    return __vmaxs4(a, b);
  } else if constexpr (std::is_same_v<T, uint16_t>) {
    return __vmaxu2(a, b);
  } else if constexpr (std::is_same_v<T, int16_t>) {
    return __vmaxs2(a, b);
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, Float16>, __half2, __nv_bfloat162>;
    Pair x, y;
    memcpy(&x, &a, sizeof(x));
    memcpy(&y, &b, sizeof(y));
    x = __hmax2_nan(x, y);
    memcpy(&a, &x, sizeof(a));
    return a;
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void KeepLarger(Vector<T, kCount>& best, const Vector<T, kCount>& other) {
  if constexpr (sizeof(T) < 4 && sizeof(T) * kCount % 4 == 0) {
    constexpr int kWords = sizeof(T) * kCount / 4;
    uint32_t a[kWords], b[kWords];
    memcpy(a, &best, sizeof(a));
    memcpy(b, &other, sizeof(b));
#pragma unroll
    for (int i = 0; i < kWords; ++i) a[i] = PackedLarger<T>(a[i], b[i]);
    memcpy(&best, a, sizeof(a));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) best.lane[i] = HardwareLarger(best.lane[i], other.lane[i]);
  }
}

// kCount neighbouring cells of one segment under reduction. Rows come in any order.
template <typename T, int kCount, bool kWithWinner>
struct Accumulator {
  Vector<T, kCount> best;

  __device__ __forceinline__ void Start() { best = Repeat<kCount>(MaxIdentity<T>()); }
  __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, bool) { KeepLarger(best, values); }
  __device__ __forceinline__ void Merge(const Accumulator& other, bool) { KeepLarger(best, other.best); }

  __device__ __forceinline__ void Load(const T* values, const int32_t*) { best = LoadVector<kCount>(values); }
  __device__ __forceinline__ void Store(T* values, int32_t*) const { StoreVector(values, best); }
};

template <typename T, int kCount>
struct Accumulator<T, kCount, true> {
  // The 16-bit types are exact in float, and comparing there needs no conversion of `best` at each row.
  using C = ComputeType<T>;
  Cell<C> cells[kCount];

  __device__ __forceinline__ void Start() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) cells[i] = Cell<C>{};
  }

  // AddRow in few instructions: NaN and zeros are left to the maximum of the hardware (the winner of a NaN does not
  // matter before FinalWinner), and a tie is a minimum: towards the lower row, kNoWinner being the greatest unsigned
  // number, or one below the lesser of the count and kNoWinner.
  __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t row, bool first_wins) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const C value = static_cast<C>(values.lane[i]), best = cells[i].best;
      const int32_t winner = cells[i].winner;
      const int32_t tied = first_wins
                               ? static_cast<int32_t>(min(static_cast<uint32_t>(winner), static_cast<uint32_t>(row)))
                               : min(winner, kNoWinner) - 1;
      cells[i].winner = value > best ? row : (value == best ? tied : winner);
      cells[i].best = HardwareLarger(best, value);
    }
  }
  __device__ __forceinline__ void Merge(const Accumulator& other, bool first_wins) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) MergeCell(cells[i], other.cells[i], first_wins);
  }

  __device__ __forceinline__ void Load(const T* values, const int32_t* winners) {
    const Vector<T, kCount> best = LoadVector<kCount>(values);
    const Vector<int32_t, kCount> winner = LoadVector<kCount>(winners);
#pragma unroll
    for (int i = 0; i < kCount; ++i) cells[i] = Cell<C>{static_cast<C>(best.lane[i]), winner.lane[i]};
  }
  __device__ __forceinline__ void Store(T* values, int32_t* winners) const {
    Vector<T, kCount> best;
    Vector<int32_t, kCount> winner;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      best.lane[i] = static_cast<T>(cells[i].best);
      winner.lane[i] = FinalWinner(cells[i]);
    }
    StoreVector(values, best);
    StoreVector(winners, winner);
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
