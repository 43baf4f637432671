// What all segment reductions share: the problem, and properties of element types. For the CPU and the CUDA kernels.
//
// A cell is one (segment, feature) pair of the result.
//
// Each op, or pair of ops, has a folder with files of the same names:
//   call.h            its calls, as they are decoded once for both back ends
//   handler.h         checks the buffers of a call; the handlers, which differ in what runs it
//   arithmetic.h      the scalar arithmetic of both back ends
//   kernels_cpu.cc    the CPU kernels and targets
//   handler_cuda.cc   the CUDA targets
//   launch.cuh        the launchers and plans of the CUDA kernels
//   kernels*.cu       these launchers, and the kernels that no other file includes
//   reduction.cuh     the op as the kernels of engine/ take it
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/core/bit_cast.h"
#include "ffi/core/element_type.h"

namespace jax_baracuda::segment {

// data [batch or 1, rows, features], segment_ids [batch or 1, rows], result [batch, segments, features].
// An operand whose leading dimension is 1 is shared by the whole batch.
struct Problem {
  int64_t batch;
  int64_t rows;
  int64_t segments;
  int64_t features;
  bool data_is_shared;
  bool ids_are_shared;

  int64_t DataRow(int64_t b, int64_t row) const { return data_is_shared ? row : b * rows + row; }
  int64_t IdIndex(int64_t b, int64_t row) const { return ids_are_shared ? row : b * rows + row; }
  bool HasNoResult() const { return batch == 0 || segments == 0 || features == 0; }
};

// What the calls of all segment ops have in common. A call is decoded once, for both back ends; ops add their arrays.
struct SegmentCall {
  Problem problem{};
  ElementType type = ElementType::kUnsupported;  // of data, or of its cotangent
  const void* segment_ids = nullptr;
  bool ids_are_64_bit = false;
  bool indices_are_sorted = false;
  bool deterministic = false;  // terms are added in an order that does not depend on timing, also where that is slower
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
};

// Calls whose rows are edges: each takes the row of `data` that its gather id names.
struct GatheringCall : SegmentCall {
  const void* data = nullptr;  // [batch or 1, num_rows, features], shared if problem.data_is_shared
  int64_t num_rows = 0;
  const int32_t* gather_ids = nullptr;  // [batch or 1, edges]
  bool gather_ids_are_shared = false;
  // [batch or 1, edges], the number of the edge at each place; or nullptr, where places are numbers
  const int32_t* edge_order = nullptr;
  bool edge_order_is_shared = false;
};

// True where T has NaN, infinities and a negative zero (std::is_floating_point leaves out the 16-bit types).
template <typename T>
inline constexpr bool kIsFloating =
    std::is_floating_point_v<T> || std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

template <typename T>
JB_HOST_DEVICE bool IsNan(T x) {
  if constexpr (kIsFloating<T>) {
    const ComputeType<T> value = static_cast<ComputeType<T>>(x);
    return value != value;
  } else {
    return false;
  }
}

}  // namespace jax_baracuda::segment
