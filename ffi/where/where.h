// The calls of the where ops, the repetition of operands along the output, and the sums of gradients, for both back
// ends.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/core/element_type.h"
#include "ffi/core/executor.h"
#include "ffi/core/integers.h"
#include "ffi/core/plan.h"

namespace jax_baracuda::where {

// The widest elements: complex numbers of two doubles.
struct alignas(16) Bytes16 {
  uint64_t halves[2];
};

// Calls body(TypeTag<T>{}) with a type of `element_bytes` bytes. If there is none, returns false and calls nothing.
template <typename Body>
bool DispatchBytes(int element_bytes, Body&& body) {
  switch (element_bytes) {
    case 1:
      return body(TypeTag<uint8_t>{}), true;
    case 2:
      return body(TypeTag<uint16_t>{}), true;
    case 4:
      return body(TypeTag<uint32_t>{}), true;
    case 8:
      return body(TypeTag<uint64_t>{}), true;
    case 16:
      return body(TypeTag<Bytes16>{}), true;
    default:
      return false;
  }
}

inline constexpr int kMaxDimensions = 32;

// Maps elements of the row-major output to an array that is repeated along some dimensions. Dimensions of size 1 are
// dropped. Neighbouring repeated dimensions are merged, and so are neighbouring other dimensions. So the remaining
// ones, the innermost first, alternate between the two kinds.
struct Repetition {
  int rank = 0;
  int64_t size[kMaxDimensions];
  int64_t stride[kMaxDimensions];  // in the array; 0 if it is repeated

  // Adds the next outer dimension, whose size is at least 2. `array_size` is the array's size over the dimensions so
  // far. Returns false if there are too many dimensions.
  bool Add(int64_t dimension, bool is_repeated, int64_t array_size) {
    if (rank > 0 && (stride[rank - 1] == 0) == is_repeated) {
      size[rank - 1] = MultiplySizes(size[rank - 1], dimension);
      return true;
    }
    if (rank == kMaxDimensions) return false;
    size[rank] = dimension;
    stride[rank] = is_repeated ? 0 : array_size;
    ++rank;
    return true;
  }

  bool IsScalar() const { return rank == 0 || (rank == 1 && stride[0] == 0); }
  bool IsDense() const { return rank == 0 || (rank == 1 && stride[0] == 1); }
};

// Sets the repetition of an array with dimensions `own` along an output of the same rank. Returns false if there are
// too many dimensions.
template <typename Dimensions>
bool MakeRepetition(const Dimensions& output, const Dimensions& own, Repetition* repetition) {
  int64_t size = 1;
  for (size_t i = output.size(); i-- > 0;) {
    if (output[i] == 1) continue;
    if (!repetition->Add(output[i], own[i] == 1, size)) return false;
    size = MultiplySizes(size, own[i]);
  }
  return true;
}

struct Operand {
  const void* data;
  Repetition repetition;
};

// output = cond ? a : b. Elements are plain bytes.
struct SelectCall {
  int64_t size;
  int element_bytes;
  Operand a, b, cond;
  void* output;

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// A sum over the rows of [outer, rows, inner].
struct Sum {
  int64_t outer, rows, inner;

  int64_t results() const { return outer * inner; }
  bool operator==(const Sum& other) const { return outer == other.outer && rows == other.rows && inner == other.inner; }
};

// Sets the sum that reduces dimensions `whole` to `own`, of the same rank. Returns false if the reduced dimensions are
// not adjacent.
template <typename Dimensions>
bool MakeSum(const Dimensions& whole, const Dimensions& own, Sum* sum) {
  *sum = Sum{1, 1, 1};
  bool has_ended = false;  // the reduced dimensions
  for (size_t i = whole.size(); i-- > 0;) {
    if (whole[i] == own[i]) {
      has_ended = has_ended || (sum->rows != 1 && whole[i] != 1);
      int64_t& kept = has_ended ? sum->outer : sum->inner;
      kept = MultiplySizes(kept, whole[i]);
    } else if (!has_ended) {
      sum->rows = MultiplySizes(sum->rows, whole[i]);
    } else {
      return false;
    }
  }
  return true;
}

// da = cond ? d_output : 0 and db = cond ? 0 : d_output. A summed result has the compute type of `type`. If both are
// summed, they have the same `sum`.
struct SplitCall {
  int64_t size;
  int element_bytes;
  ElementType type;  // used only for sums
  const void* d_output;
  Operand cond;
  void *da, *db;
  bool a_is_summed, b_is_summed;
  Sum sum{};
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;

  int num_sums() const { return (a_is_summed ? 1 : 0) + (b_is_summed ? 1 : 0); }
  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::where
