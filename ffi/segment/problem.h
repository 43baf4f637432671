// Shared by all segment ops and both back ends: the problem, and properties of element types.
//
// A cell is one (segment, feature) pair of the result.
//
// Each op, or family of ops, has a folder with files of the same names:
//   call.h            the decoded call, for both back ends, and its CUDA launcher
//   handler.h         the handlers: check the buffers of a call; templates over the back end that runs it
//   arithmetic.h      the scalar arithmetic of both back ends
//   kernels_cpu.cc    the CPU kernels and targets
//   handler_cuda.cc   the CUDA targets
//   kernels*.cu       the CUDA launchers and plans, and kernels used by one file only
//   reduction.cuh     the op as a reduction for the kernels of engine/
#pragma once

#include <cstdint>
#include <type_traits>

#include "ffi/core/batch_operand.h"
#include "ffi/core/element_type.h"
#include "ffi/core/plan.h"

// Calls declare their CUDA launchers in CPU builds too, which lack the headers of CUDA.
using cudaStream_t = struct CUstream_st*;
namespace jax_baracuda {
struct CudaStatus;
}  // namespace jax_baracuda

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

// Common to the calls of all segment ops. A call is decoded once, for both back ends; ops add their arrays and, for the
// CUDA module alone,
//   CudaPlan()            how LaunchOnCuda runs, from shapes and flags alone
//   LaunchOnCuda(stream)  writes every element of the results. It only enqueues work on `stream`: no allocation, no
//                         synchronisation, and the same launches for the same problem
struct SegmentCall {
  Problem problem{};
  ElementType type = ElementType::kUnsupported;  // of data, or of its cotangent
  const void* segment_ids = nullptr;
  bool ids_are_64_bit = false;
  bool indices_are_sorted = false;
  bool deterministic = false;  // the order of additions is fixed, even if that is slower
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;

  // The ids of the batch elements from this one on.
  const void* IdsFrom(int64_t element) const {
    return static_cast<const char*>(segment_ids) + problem.IdIndex(element, 0) * (ids_are_64_bit ? 8 : 4);
  }
};

// Calls whose rows are edges: each edge reads the row of `data` that its gather id names.
struct GatheringCall : SegmentCall {
  const void* data = nullptr;  // [batch or 1, num_rows, features], shared if problem.data_is_shared
  int64_t num_rows = 0;
  BatchOperand gather_ids;  // int32 [batch or 1, edges]
  BatchOperand edge_order;  // int32 [batch or 1, edges], the edge's number at each position; by default the position

  JB_ALWAYS_INLINE BatchOperand Data() const { return {data, problem.data_is_shared}; }
};

// Whether T has NaN, infinities and a negative zero (std::is_floating_point excludes the 16-bit types).
template <typename T>
inline constexpr bool kIsFloating =
    std::is_floating_point_v<T> || std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

}  // namespace jax_baracuda::segment
