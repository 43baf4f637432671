// Maximum, minimum and their rows as reductions in registers (see engine/reduction.cuh).
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/reduction.cuh"
#include "ffi/segment/extremum/arithmetic.h"
#include "ffi/segment/extremum/call.h"

namespace jax_baracuda::segment {

// FlipMask, repeated over a word.
template <typename T>
using FlipWord = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T>
FlipWord<T> FlipWordMask(ElementType type, bool is_minimum) {
  FlipWord<T> word = FlipMask<T>(type, is_minimum);
  for (int bits = 8 * sizeof(T); bits < 8 * static_cast<int>(sizeof(word)); bits *= 2) word |= word << bits;
  return word;
}

template <typename T>
__device__ __forceinline__ T Flip(T value, BitsOf<T> mask) {
  return BitCast<T>(static_cast<BitsOf<T>>(BitCast<BitsOf<T>>(value) ^ mask));
}

template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> FlipAll(Vector<T, kCount> vector, FlipWord<T> mask) {
  if constexpr (sizeof(vector) % sizeof(mask) == 0) {
    FlipWord<T> words[sizeof(vector) / sizeof(mask)];
    memcpy(words, &vector, sizeof(vector));
#pragma unroll
    for (FlipWord<T>& word : words) word ^= mask;
    memcpy(&vector, words, sizeof(vector));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.lane[i] = Flip(vector.lane[i], static_cast<BitsOf<T>>(mask));
  }
  return vector;
}

// The maximum of no rows: -inf, or the lowest value of an integer type.
template <typename T>
__device__ __forceinline__ T MaxIdentity() {
  if constexpr (kIsFloating<T>) {
    return static_cast<T>(-std::numeric_limits<ComputeType<T>>::infinity());
  } else {
    return std::numeric_limits<T>::lowest();
  }
}

// Of two equal values, prefers +0 to -0. Always returns one of the two, even if the processor flushes denormals, so
// that different denormals compare equal.
template <typename T>
__device__ __forceinline__ T PositiveZero(T a, T b) {
  if constexpr (kIsFloating<T>) {
    return BitCast<BitsOf<T>>(a) >> (8 * sizeof(T) - 1) != 0 ? b : a;
  } else {
    return a;
  }
}

// max(a, b) with NaN propagated and +0 above -0.
template <typename T>
__device__ __forceinline__ T Larger(T a, T b) {
  const ComputeType<T> x = static_cast<ComputeType<T>>(a), y = static_cast<ComputeType<T>>(b);
  if constexpr (kIsFloating<T>) {
    return (y > x || y != y) ? b : (x == y ? PositiveZero(a, b) : a);
  } else {
    return y > x ? b : a;
  }
}

// Values as unsigned integers of the same order: NaN of either sign above everything, -0 below +0. No key of a number is
// below 0, so 0 is the maximum of no rows.
template <typename T>
using OrderedKey = std::conditional_t<sizeof(T) == 8, unsigned long long, unsigned int>;

template <typename T>
__device__ __forceinline__ OrderedKey<T> EncodeKey(T value) {
  using Key = OrderedKey<T>;
  if constexpr (kIsFloating<T>) {
    constexpr int kSignBit = 8 * sizeof(Key) - 1;
    const ComputeType<T> x = static_cast<ComputeType<T>>(value);
    const auto bits = BitCast<std::make_signed_t<Key>>(x);
    const Key ordered = static_cast<Key>(bits) ^ (static_cast<Key>(bits >> kSignBit) | Key{1} << kSignBit);
    return x != x ? ~Key{0} : ordered;
  } else {
    return static_cast<Key>(value) - static_cast<Key>(std::numeric_limits<T>::lowest());
  }
}

// Larger(a, b) in one instruction if the hardware has it; it propagates NaN and puts +0 above -0.
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

// The larger of two or four narrow values, packed in a word.
template <typename T>
__device__ __forceinline__ uint32_t PackedLarger(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<T, int8_t>) {
    return __vmaxs4(a, b);
  } else if constexpr (std::is_same_v<T, int16_t>) {
    return __vmaxs2(a, b);
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, Float16>, __half2, __nv_bfloat162>;
    Pair x, y;  // not trivially copyable, so BitCast refuses them
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

// The maximum, or the minimum with the right `flip`.
template <typename T>
struct MaxReduction {
  using Element = T;
  static constexpr int kRowsInFlight = sizeof(T) == 8 ? 4 : 8;
  static constexpr int kTileBlocks = sizeof(T) < 4 ? 6 : 8;

  struct Outputs {
    T* output;
    FlipWord<T> flip;
  };

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(T) * kCount)) Accumulator {
    Vector<T, kCount> best;

    __device__ __forceinline__ void Start() { best = Repeat<kCount>(MaxIdentity<T>()); }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& values, int32_t, const Outputs& outputs) {
      KeepLarger(best, FlipAll(values, outputs.flip));
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) { KeepLarger(best, other.best); }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      StoreVector(outputs.output + segment * features + feature, FlipAll(best, outputs.flip));
    }
  };
};

// An unfinished cell. The winner of a NaN is undefined.
template <typename T>
struct Cell {
  T best;
  int32_t winner;
};

// Folds in the cell of other rows of the same segment, in any order.
template <typename T>
__device__ __forceinline__ void MergeCell(Cell<T>& cell, const Cell<T>& other, bool first_wins) {
  const ComputeType<T> x = static_cast<ComputeType<T>>(other.best), best = static_cast<ComputeType<T>>(cell.best);
  if (x > best || x != x) {
    cell = other;
  } else if (x == best) {
    cell.best = PositiveZero(cell.best, other.best);
    const bool is_identity = best == static_cast<ComputeType<T>>(MaxIdentity<T>());
    cell.winner = WinnerOfBoth(cell.winner, other.winner, first_wins, is_identity ? 1 : 0);
  }
}

// The maximum and its winner.
template <typename T>
struct WinnerReduction {
  using Element = T;
  static constexpr int kRowsInFlight = 4;
  static constexpr int kTileBlocks = sizeof(T) < 4 ? 6 : 5;

  struct Outputs {
    T* output;
    int32_t* winner;
    FlipWord<T> flip;
    bool first_wins;
  };

  // 16-bit types are exact in float. Keeping `best` as float avoids converting it for each row.
  using C = ComputeType<T>;

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(C) * kCount)) Accumulator {
    C best[kCount];
    int32_t winner[kCount];

    __device__ __forceinline__ void Start() {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        best[i] = MaxIdentity<C>();
        winner[i] = kNoWinner;
      }
    }

    // Folds one row into each cell, rows in ascending order. The hardware maximum handles NaN and zeros; the winner of a
    // NaN does not matter before the end.
    __device__ __forceinline__ void Add(const Vector<T, kCount>& unflipped, int32_t row, const Outputs& outputs) {
      const Vector<C, kCount> values = Widen(FlipAll(unflipped, outputs.flip));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const C value = values.lane[i];
        const bool is_larger = value > best[i], ties = value == best[i];
        // WinnerOfBoth in one instruction or two each, since the tie count of a row is 1.
        const int32_t first = static_cast<int32_t>(min(static_cast<uint32_t>(winner[i]), static_cast<uint32_t>(row)));
        const int32_t counted = min(winner[i], kNoWinner) - 1, tied = outputs.first_wins ? first : counted;
        // Two separate selections: nested ones become branches.
        winner[i] = ties ? tied : winner[i];
        winner[i] = is_larger ? row : winner[i];
        best[i] = HardwareLarger(best[i], value);
      }
    }

    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs& outputs) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        Cell<C> cell{best[i], winner[i]};
        MergeCell(cell, Cell<C>{other.best[i], other.winner[i]}, outputs.first_wins);
        best[i] = cell.best;
        winner[i] = cell.winner;
      }
    }

    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      const int64_t cell = segment * features + feature;
      Vector<T, kCount> values;
      Vector<int32_t, kCount> winners;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values.lane[i] = static_cast<T>(best[i]);
        winners.lane[i] = best[i] == best[i] ? winner[i] : kNoWinner;
      }
      StoreVector(outputs.output + cell, FlipAll(values, outputs.flip));
      StoreVector(outputs.winner + cell, winners);
    }
  };
};

// Few unsorted segments use tables in shared memory instead.
template <typename T>
inline constexpr bool kAllowsPrivateTable<WinnerReduction<T>> = false;

// The first row that attains the maximum.
template <typename T>
struct ArgReduction {
  using Element = T;
  using C = ComputeType<T>;
  using Key = OrderedKey<C>;
  static constexpr int kRowsInFlight = 4;
  static constexpr int kTileBlocks = sizeof(T) < 4 ? 6 : 5;

  struct Outputs {
    int32_t* row;
    int32_t no_row;  // for an empty segment
    FlipWord<T> flip;
  };

  template <int kCount>
  struct alignas(VectorAlignment(sizeof(Key) * kCount)) Accumulator {
    Key best[kCount];
    int32_t row[kCount];

    __device__ __forceinline__ void Start() {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        best[i] = ArgCell<Key>{}.best;
        row[i] = kNoWinner;
      }
    }
    __device__ __forceinline__ void Add(const Vector<T, kCount>& unflipped, int32_t new_row, const Outputs& outputs) {
      const Vector<T, kCount> values = FlipAll(unflipped, outputs.flip);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        Take(i, EncodeKey(static_cast<C>(values.lane[i]) + C{0}), new_row);  // -0 + 0 is +0
      }
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) Take(i, other.best[i], other.row[i]);
    }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      Vector<int32_t, kCount> rows;
#pragma unroll
      for (int i = 0; i < kCount; ++i) rows.lane[i] = row[i] == kNoWinner ? outputs.no_row : row[i];
      StoreVector(outputs.row + segment * features + feature, rows);
    }

   private:
    __device__ __forceinline__ void Take(int i, Key key, int32_t new_row) {
      ArgCell<Key> cell{best[i], row[i]};
      MergeArgCell(cell, key, new_row);
      best[i] = cell.best;
      row[i] = cell.row;
    }
  };
};

// In registers (see engine/reduce.cuh). Each has its own file because these compile the most kernels.
struct ReducePlan;
CudaStatus ReduceMaximum(const ExtremumCall& call, const ReducePlan& plan, cudaStream_t stream);
CudaStatus ReduceWithWinner(const ExtremumCall& call, const ReducePlan& plan, cudaStream_t stream);

}  // namespace jax_baracuda::segment
