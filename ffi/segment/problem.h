// Shared by all segment ops and both back ends: the problem, and properties of element types.
//
// A cell is one (segment, feature) pair of the result.
//
// Each op, or family of ops, has a folder with files of the same names:
//   call.h            the decoded call, and how each back end runs it
//   handler.cc        the handlers, which check the buffers of a call, and the targets; compiled for each back end
//   arithmetic.h      the scalar arithmetic of both back ends
//   kernels_cpu.cc    the CPU kernels
//   kernels*.cu       the CUDA launchers and plans, and kernels used by one file only
//   reduction.cuh     the op as a reduction for the kernels of engine/
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "ffi/core/batch_operand.h"
#include "ffi/core/element_type.h"
#include "ffi/core/executor.h"
#include "ffi/core/plan.h"

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
  int64_t NumCells() const { return batch * segments * features; }
  bool HasNoResult() const { return batch == 0 || segments == 0 || features == 0; }
};

// Common to the calls of all segment ops. Ops add their arrays, and the functions of executor.h.
struct SegmentCall {
  Problem problem{};
  ElementType type = ElementType::kUnsupported;  // of data, or of its cotangent
  const void* segment_ids = nullptr;
  bool ids_are_64_bit = false;
  bool indices_are_sorted = false;
  bool deterministic = false;  // the order of additions is fixed, even if that is slower
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
};

// Calls whose rows are edges: each edge reads the row of `data` that its gather id names.
struct GatheringCall : SegmentCall {
  const void* data = nullptr;  // [batch or 1, num_rows, features], shared if problem.data_is_shared
  int64_t num_rows = 0;
  BatchOperand gather_ids;  // int32 [batch or 1, edges]
  BatchOperand edge_order;  // int32 [batch or 1, edges], the edge's number at each position; by default the position

  BatchOperand Data() const { return {data, problem.data_is_shared}; }
};

// Whether T has NaN, infinities and a negative zero (std::is_floating_point excludes the 16-bit types).
template <typename T>
inline constexpr bool kIsFloating =
    std::is_floating_point_v<T> || std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

}  // namespace jax_baracuda::segment
