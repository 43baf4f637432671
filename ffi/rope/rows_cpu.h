// Rotation of rows by CPU kernels: the sines and cosines of positions, and the rows that use them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "ffi/core/cpu_kernel.h"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

// The cosines, then the sines, of one position. `angles` is a buffer. `are_near`: all angles are within the limit of
// IsNear.
template <typename T>
void ComputeRotations(int64_t pairs, bool are_near, Rotation<AngleType<T>> scale, double* angles,
                      ComputeType<T>* cos_sin);

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

// The features of a row: 2 pairs of them are rotated, the others are copied.
struct RotatedPart {
  int64_t features, pairs, first;
};

// Rotates contiguous rows. The angles of the next row are angle_stride numbers further.
template <typename T>
void RotateRows(bool interleaved, const T* x, int64_t rows, const RotatedPart& part, const ComputeType<T>* cos_sin,
                int64_t angle_stride, T* y);

}  // namespace jax_baracuda::rope
