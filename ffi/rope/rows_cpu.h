// Rotation of rows by CPU kernels: the sines and cosines of positions, and the rows that use them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/float16_cpu.h"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

// The cosines, then the sines, of one position. `angles` is a buffer. `are_near`: all angles are within the limit of
// IsNear.
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

// The sines and cosines of a block of positions.
template <typename T>
class Table {
 public:
  using C = ComputeType<T>;

  Table(const Problem& problem, const BatchOperand& frequencies, const Positions& positions,
        Rotation<AngleType<T>> scale, int64_t max_length)
      : problem_(problem),
        from_(frequencies),
        positions_(positions),
        scale_(scale),
        pairs_(problem.pairs),
        frequencies_(Allocate<double>(pairs_)),
        angles_(Allocate<double>(pairs_)),
        numbers_(Allocate<C>(2 * max_length * pairs_)) {}

  bool has_memory() const { return frequencies_ != nullptr && angles_ != nullptr && numbers_ != nullptr; }

  // For positions [begin, begin + length) of an example.
  void Compute(int64_t example, int64_t begin, int64_t length) {
    const int64_t batch = example / problem_.examples;
    LoadFrequencies(batch);
    const auto first_of = [&](int section) {
      return PositionsOf(positions_, batch, problem_.examples, example % problem_.examples, section) * problem_.length +
             begin;
    };
    double* const angles = angles_.get();
    const double* const frequencies = frequencies_.get();
    for (int64_t i = 0; i < length; ++i) {
      double largest = 0;
      if (positions_.sections.count > 1) {
        double of_section[kMaxSections];
        for (int section = 0; section < positions_.sections.count; ++section) {
          of_section[section] = PositionAt(first_of(section) + i);
          largest = std::max(largest, std::fabs(of_section[section]));
        }
        for (int64_t pair = 0; pair < pairs_; ++pair) {
          angles[pair] = of_section[positions_.sections.Of(pair)] * frequencies[pair];
        }
      } else {
        const double position =
            positions_.data == nullptr ? static_cast<double>(begin + i) : PositionAt(first_of(0) + i);
        largest = std::fabs(position);
        JB_VECTORIZE
        for (int64_t pair = 0; pair < pairs_; ++pair) angles[pair] = position * frequencies[pair];
      }
      const bool are_near = IsNear<T>(largest * largest_frequency_);  // false for NaN
      ComputeRotations<T>(pairs_, are_near, scale_, angles, numbers_.get() + i * stride());
    }
  }

  // The cosines of a position, followed by its sines.
  const C* At(int64_t i) const { return numbers_.get() + i * stride(); }
  int64_t stride() const { return 2 * pairs_; }

 private:
  double PositionAt(int64_t i) const {
    return positions_.are_64_bit ? static_cast<double>(static_cast<const int64_t*>(positions_.data)[i])
                                 : static_cast<double>(static_cast<const int32_t*>(positions_.data)[i]);
  }

  void LoadFrequencies(int64_t batch) {
    const int64_t row = from_.is_shared ? 0 : batch;
    if (row == loaded_row_) return;
    const C* const from = static_cast<const C*>(from_.data) + row * 2 * pairs_;
    largest_frequency_ = 0;
    for (int64_t i = 0; i < pairs_; ++i) {
      frequencies_[i] = Frequency(from[i], from[pairs_ + i]);
      const double size = std::fabs(frequencies_[i]);
      if (size > largest_frequency_ || std::isnan(size)) largest_frequency_ = size;
    }
    loaded_row_ = row;
  }

  const Problem problem_;
  const BatchOperand from_;
  const Positions positions_;
  const Rotation<AngleType<T>> scale_;
  const int64_t pairs_;
  const Memory<double> frequencies_, angles_;
  const Memory<C> numbers_;
  double largest_frequency_ = 0;
  int64_t loaded_row_ = -1;
};

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

// The features of a row: 2 pairs of them are rotated, the others are copied.
struct RotatedPart {
  int64_t features, pairs, first;
};

// Rotates contiguous rows. The angles of the next row are angle_stride numbers further.
template <bool kInterleaved, typename T, typename C>
JB_CPU_CLONES void RotateRows(const T* x, int64_t rows, const RotatedPart part, const C* cos_sin, int64_t angle_stride,
                              T* y) {
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

// The same. Rows of float16 without copied features are converted many at once, and rotated as float32.
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
        RotateRows<kInterleaved>(numbers, count, part, cos_sin + begin * angle_stride, angle_stride, numbers);
        Narrow(numbers, count * features, y + first);
      }
      return;
    }
  }
  RotateRows<kInterleaved>(x, rows, part, cos_sin, angle_stride, y);
}

}  // namespace jax_baracuda::rope
