// The rotation of rows on CPUs, for rope and rope_write.
#include "ffi/rope/rows_cpu.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/element_type.h"
#include "ffi/core/float16_cpu.h"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {
namespace {

// Two neighbouring 16-bit elements as one word, so that the conversions need no shuffles.
typedef uint32_t PairWord __attribute__((aligned(2), may_alias));

template <typename T>
JB_INLINE float ElementOf(uint32_t half_of_word) {
  T element;
  element.bits = static_cast<uint16_t>(half_of_word);
  return element;
}

template <bool kInterleaved, typename T, typename C>
JB_INLINE void RotateRow(const T* x, int64_t pairs, const C* cos, T* y) {
  const C* const sin = cos + pairs;
  if constexpr (!kInterleaved) {
    JB_VECTORIZE
    for (int64_t i = 0; i < pairs; ++i) {
      C a = static_cast<C>(x[i]), b = static_cast<C>(x[i + pairs]);
      Rotate(cos[i], sin[i], &a, &b);
      Store(a, y + i);
      Store(b, y + i + pairs);
    }
  } else if constexpr (sizeof(T) == sizeof(uint16_t)) {
    const PairWord* const from = reinterpret_cast<const PairWord*>(x);
    PairWord* const to = reinterpret_cast<PairWord*>(y);
    JB_VECTORIZE
    for (int64_t i = 0; i < pairs; ++i) {
      const uint32_t word = from[i];
      C a = ElementOf<T>(word & 0xffffu), b = ElementOf<T>(word >> 16);
      Rotate(cos[i], sin[i], &a, &b);
      const uint32_t low = static_cast<T>(a).bits, high = static_cast<T>(b).bits;
      to[i] = low | high << 16;
    }
  } else {
    JB_VECTORIZE
    for (int64_t i = 0; i < pairs; ++i) {
      C a = x[2 * i], b = x[2 * i + 1];
      Rotate(cos[i], sin[i], &a, &b);
      y[2 * i] = a;
      y[2 * i + 1] = b;
    }
  }
}

template <bool kInterleaved, typename T, typename C>
JB_CPU_CLONES void RotateRowsOfOrder(const T* x, int64_t rows, const RotatedPart part, const C* cos_sin,
                                     int64_t angle_stride, T* y) {
  const int64_t end = part.first + 2 * part.pairs;
  const auto copy = [&](int64_t begin, int64_t count) __attribute__((always_inline)) {
    if (count > 0 && y != x) std::memcpy(y + begin, x + begin, static_cast<size_t>(count) * sizeof(T));
  };
  const auto rotate = [&](auto pairs_of_row) __attribute__((always_inline)) {
    for (int64_t row = 0; row < rows; ++row) {
      RotateRow<kInterleaved>(x + part.first, pairs_of_row, cos_sin, y + part.first);
      copy(0, part.first);
      copy(end, part.features - end);
      x += part.features;
      y += part.features;
      cos_sin += angle_stride;
    }
  };
  // Constant sizes for short rows, where the overhead of a loop would be as large as its body.
  if (!DispatchConstant<8, 16, 32>(part.pairs, rotate)) rotate(part.pairs);
}

// Rows of float16 without copied features are converted many at once, and rotated as float32.
template <bool kInterleaved, typename T>
void RotateAnyRows(const T* x, int64_t rows, const RotatedPart& part, const ComputeType<T>* cos_sin,
                   int64_t angle_stride, T* y) {
  if constexpr (kIsWidenedAtOnce<T>) {
    const int64_t features = part.features;
    if (features == 2 * part.pairs && features <= kWidenedAtOnce) {
      float numbers[kWidenedAtOnce];
      const int64_t rows_at_once = kWidenedAtOnce / features;
      for (int64_t begin = 0; begin < rows; begin += rows_at_once) {
        const int64_t count = std::min(rows_at_once, rows - begin), first = begin * features;
        Widen(x + first, count * features, numbers);
        RotateRowsOfOrder<kInterleaved>(numbers, count, part, cos_sin + begin * angle_stride, angle_stride, numbers);
        Narrow(numbers, count * features, y + first);
      }
      return;
    }
  }
  RotateRowsOfOrder<kInterleaved>(x, rows, part, cos_sin, angle_stride, y);
}

}  // namespace

template <typename T>
JB_CPU_CLONES void ComputeRotations(int64_t pairs, bool are_near, Rotation<AngleType<T>> scale, double* angles,
                                    ComputeType<T>* cos_sin) {
  for (int64_t i = 0; !are_near && i < pairs; ++i) angles[i] = Nearer<T>(angles[i]);
  JB_VECTORIZE
  for (int64_t i = 0; i < pairs; ++i) {
    const Rotation<ComputeType<T>> rotation = Scaled<T>(RotationByNear<T>(angles[i]), scale);
    cos_sin[i] = rotation.cos;
    cos_sin[pairs + i] = rotation.sin;
  }
}

template <typename T>
void RotateRows(bool interleaved, const T* x, int64_t rows, const RotatedPart& part, const ComputeType<T>* cos_sin,
                int64_t angle_stride, T* y) {
  const auto rotate = interleaved ? RotateAnyRows<true, T> : RotateAnyRows<false, T>;
  rotate(x, rows, part, cos_sin, angle_stride, y);
}

// NOLINTBEGIN(bugprone-macro-parentheses): the arguments are types.
#define JB_ROWS_OF(T)                                                                                 \
  template void ComputeRotations<T>(int64_t, bool, Rotation<AngleType<T>>, double*, ComputeType<T>*); \
  template void RotateRows(bool, const T*, int64_t, const RotatedPart&, const ComputeType<T>*, int64_t, T*);
JB_ROWS_OF(Float16)
JB_ROWS_OF(BFloat16)
JB_ROWS_OF(float)
JB_ROWS_OF(double)
#undef JB_ROWS_OF
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace jax_baracuda::rope
