// Shared by the CUDA kernels of where: operands that may be repeated, and the selection.
//
// Elements are plain bytes. Loaded vectors stay packed in words.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/vectors.cuh"
#include "ffi/where/where.h"

namespace jax_baracuda::where {

// ---- The selection.

// One byte per flag of the vector, four per word: 0xFF if the flag is not zero.
template <int kCount>
struct Mask {
  uint32_t words[CeilDivide(kCount, 4)];

  __device__ __forceinline__ explicit Mask(const Packed<uint8_t, kCount>& flags) {
    words[0] = 0;
    memcpy(words, &flags, sizeof(flags));
#pragma unroll
    for (uint32_t& word : words) word = __vcmpne4(word, 0);
  }

  __device__ __forceinline__ bool operator[](int i) const { return (words[i / 4] >> (8 * (i % 4)) & 1) != 0; }

  // The mask of the i-th 32-bit word of a vector: 0xFF in the bytes of elements whose flag is not zero.
  template <int kElementBytes>
  __device__ __forceinline__ uint32_t OfWord(int i) const {
    if constexpr (kElementBytes == 1) {
      return words[i];
    } else if constexpr (kElementBytes == 2) {
      return __byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x1100 : 0x3322);
    } else {
      const int element = i / (kElementBytes / 4);
      return __byte_perm(words[element / 4], 0, 0x1111 * (element % 4));
    }
  }
};

// The elements of `a` where the mask is set, otherwise those of `b`.
template <typename T, int kCount>
__device__ __forceinline__ Packed<T, kCount> Blend(const Mask<kCount>& mask, const Packed<T, kCount>& a,
                                                   const Packed<T, kCount>& b) {
  constexpr int kWords = CeilDivide(sizeof(a), 4);
  uint32_t a_words[kWords] = {}, b_words[kWords] = {};
  memcpy(a_words, &a, sizeof(a));
  memcpy(b_words, &b, sizeof(b));
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint32_t ones = mask.template OfWord<sizeof(T)>(i);
    a_words[i] = (a_words[i] & ones) | (b_words[i] & ~ones);
  }
  Packed<T, kCount> chosen;
  memcpy(&chosen, a_words, sizeof(chosen));
  return chosen;
}

// ---- Operands, indexed by elements of the output.

// An operand with the shape of the output, or of one element.
template <typename T, int kVec>
struct DenseOrScalar {
  const T* data;
  bool is_dense;

  explicit DenseOrScalar(const Operand& operand)
      : data(static_cast<const T*>(operand.data)), is_dense(operand.repetition.IsDense()) {}

  __device__ __forceinline__ Packed<T, kVec> Load(int64_t element) const {
    return is_dense ? LoadPacked<kVec>(data + element) : Pack(Repeat<kVec>(*data));
  }
  __device__ __forceinline__ T At(int64_t element) const { return data[is_dense ? element : 0]; }
};

// Any operand. Load requires RowsSuffice.
template <typename T, int kVec>
class Repeated {
 public:
  explicit Repeated(const Operand& operand) : data_(static_cast<const T*>(operand.data)) {
    const Repetition& repetition = operand.repetition;
    if (repetition.rank == 0) return;
    outer_rank_ = repetition.rank - 1;
    row_ = repetition.size[0];
    is_contiguous_ = repetition.stride[0] != 0;
    rows_are_vectors_ = outer_rank_ == 0 || row_ % kVec == 0;
    for (int i = 0; i <= outer_rank_; ++i) {
      by_size_[i] = Divider(repetition.size[i]);
      stride_[i] = repetition.stride[i];
    }
  }

  // Except at the ends of rows, branches depend only on kernel arguments, so the threads of a warp do not diverge.
  __device__ __forceinline__ Packed<T, kVec> Load(int64_t element) const {
    const int64_t row = Row(element), column = element - row * row_;
    const T* address = Address(row, column);
    if (rows_are_vectors_) return is_contiguous_ ? LoadPacked<kVec>(address) : Pack(Repeat<kVec>(*address));
    const int64_t remaining = row_ - column;
    const T* next = remaining < kVec ? Address(row + 1, 0) : address;
    Vector<T, kVec> vector;
    if (is_contiguous_) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) vector.lane[i] = i < remaining ? address[i] : next[i - remaining];
    } else {
      const T value = *address, next_value = *next;
#pragma unroll
      for (int i = 0; i < kVec; ++i) vector.lane[i] = i < remaining ? value : next_value;
    }
    return Pack(vector);
  }

  __device__ __forceinline__ T At(int64_t element) const {
    const int64_t row = Row(element);
    return *Address(row, element - row * row_);
  }

 private:
  // A row is a run of the innermost dimension.
  __device__ __forceinline__ int64_t Row(int64_t element) const {
    return outer_rank_ == 0 ? 0 : by_size_[0].Quotient(element);
  }

  __device__ __forceinline__ const T* Address(int64_t row, int64_t column) const {
    const T* address = is_contiguous_ ? data_ + column : data_;
    if (outer_rank_ == 0) return address;
#pragma unroll 1
    for (int i = 1; i < outer_rank_; ++i) {
      const int64_t quotient = by_size_[i].Quotient(row);
      address += (row - quotient * static_cast<int64_t>(by_size_[i].divisor)) * stride_[i];
      row = quotient;
    }
    return address + row * stride_[outer_rank_];
  }

  const T* data_;
  int outer_rank_ = 0;
  int64_t row_ = 1;
  bool is_contiguous_ = true;     // along a row
  bool rows_are_vectors_ = true;  // no vector crosses a row end
  Divider by_size_[kMaxDimensions];
  int64_t stride_[kMaxDimensions];
};

// Whether a vector spans at most two rows of the innermost dimension.
inline bool RowsSuffice(int elements_of_vector, const Operand& operand) {
  return operand.repetition.rank <= 1 || operand.repetition.size[0] >= elements_of_vector;
}

}  // namespace jax_baracuda::where
