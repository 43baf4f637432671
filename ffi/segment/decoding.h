// Shared by the handlers of the segment ops: checks of buffers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "ffi/core/arguments.h"
#include "ffi/core/batch.h"
#include "ffi/core/batch_operand.h"
#include "ffi/core/run.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// Whether every operand with features is shared by the batch, in a call that is described by plan parameters.
inline bool ValuesAreShared(const PlanParameters& parameters) {
  for (const char* name : {"data", "logits", "probabilities", "d_output"}) {
    const auto flag = parameters.find(std::string(name) + "_is_shared");
    if (flag != parameters.end() && flag->second == 0) return false;
  }
  return true;
}

// The call that plan parameters describe, without data.
template <typename Call>
Call CallOf(const PlanParameters& parameters) {
  Call call;
  call.problem =
      Problem{parameters.at("batch"),    parameters.at("rows"),       parameters.at("segments"),
              parameters.at("features"), ValuesAreShared(parameters), parameters.at("segment_ids_is_shared") != 0};
  call.type = TypeOfWidth(parameters.at("element_bytes"), parameters.at("is_floating") != 0);
  call.indices_are_sorted = parameters.at("indices_are_sorted") != 0;
  call.deterministic = parameters.at("deterministic") != 0;
  return call;
}

// Checks the buffers of one call. Call First, Ids and FirstRows first, in this order: they determine the sizes that the
// other buffers must have. *data receives the array. If that is a BatchOperand, the batch may share the array; if it is a
// pointer, the array must have the full batch.
class Decoder {
 public:
  Decoder(Arguments& arguments, SegmentCall* call)
      : num_batch_dims_(arguments.Integer("num_batch_dims")), call_(*call) {}

  // Any result; it determines the batch size.
  void First(const Buffer& result, const char* trailing) {
    batch_ = Batch(result, num_batch_dims_, trailing);
    if (batch_.View(result, /*may_be_shared=*/false)->dims.size() == 0) throw batch_.WrongRank(result, trailing);
    call_.problem.batch = batch_.size();
  }

  void Ids(const Buffer& segment_ids) {
    const auto view = batch_.View(segment_ids, /*may_be_shared=*/true);
    if (!view || view->dims.size() != 1) throw batch_.WrongShape(segment_ids, /*may_be_shared=*/true, "rows");
    if (segment_ids.type != XLA_FFI_DataType_S32 && segment_ids.type != XLA_FFI_DataType_S64) {
      throw segment_ids.WrongType("S32 or S64");
    }
    if (view->dims[0] >= std::numeric_limits<int32_t>::max()) {
      throw segment_ids.Wrong("has " + std::to_string(view->dims[0]) + " rows; at most 2147483646 are supported");
    }
    call_.segment_ids = segment_ids.data;
    call_.ids_are_64_bit = segment_ids.type == XLA_FFI_DataType_S64;
    call_.problem.rows = view->dims[0];
    call_.problem.ids_are_shared = view->is_shared;
  }

  // The array [.., rows, ...] that determines the trailing dimensions and the element type.
  template <typename To>
  void FirstRows(const Buffer& buffer, To* data) {
    const auto view = batch_.View(buffer, kMayBeShared<To>);
    if (!view || view->dims.size() == 0 || view->dims[0] != call_.problem.rows) {
      throw batch_.WrongShape(buffer, kMayBeShared<To>, std::to_string(call_.problem.rows) + " rows, ...");
    }
    Set(buffer, *view, data);
    TakeFeatures(buffer, *view);
  }

  // FirstRows of the operand `data`.
  void FirstData(const Buffer& buffer, const void** data) {
    BatchOperand operand;
    FirstRows(buffer, &operand);
    *data = operand.data;
    call_.problem.data_is_shared = operand.is_shared;
  }

  // The edges of a call that gathers from `data`.
  void Edges(const Buffer& data, const Buffer& gather_ids, const Buffer& segment_ids, GatheringCall* call) {
    Ids(segment_ids);
    Gathered(data, gather_ids, call);
  }

  // The array [.., num_rows, ...] that edges gather from, and the ids by which they gather. The array determines the
  // trailing dimensions and the element type. Call it after Ids.
  void Gathered(const Buffer& data, const Buffer& gather_ids, GatheringCall* call) {
    const auto view = batch_.View(data, /*may_be_shared=*/true);
    if (!view || view->dims.size() == 0) throw batch_.WrongShape(data, /*may_be_shared=*/true, "rows, ...");
    Set(data, *view, &call->data);
    call_.problem.data_is_shared = view->is_shared;
    call->num_rows = view->dims[0];
    TakeFeatures(data, *view);
    EdgeIds(gather_ids, &call->gather_ids);
  }

  // The optional operand `edge_order`.
  void EdgeOrder(Arguments& arguments, GatheringCall* call) const {
    if (arguments.Flag("has_edge_order")) EdgeIds(arguments.Operand("edge_order"), &call->edge_order);
  }

  // int32 [.., edges].
  void EdgeIds(const Buffer& buffer, BatchOperand* ids) const {
    Vector(buffer, XLA_FFI_DataType_S32, call_.problem.rows, ids);
  }

  // The trailing dimensions of the rows of `buffer` as (heads, features per head).
  void Heads(const Buffer& buffer, int64_t* heads) const {
    if (features_.size() != 2) {
      throw buffer.Wrong("has " + std::to_string(features_.size()) +
                         " dimensions of features, expected heads and features of a head");
    }
    *heads = features_[0];
  }

  // The trailing dimensions of data.
  IntegerSpan features() const { return features_; }

  template <typename To>
  void Rows(const Buffer& buffer, To* data) const {
    Array(buffer, type_, call_.problem.rows, features_, data);
  }

  // The array [.., segments, ...] that determines the number of segments.
  template <typename To>
  void FirstCells(const Buffer& buffer, DataType type, To* data) {
    const auto view = batch_.View(buffer, kMayBeShared<To>);
    if (!view || view->dims.size() == 0) throw batch_.WrongShape(buffer, kMayBeShared<To>, "segments, ...");
    call_.problem.segments = view->dims[0];
    Cells(buffer, type, data);
  }

  template <typename To>
  void Cells(const Buffer& buffer, DataType type, To* data) const {
    Array(buffer, type, call_.problem.segments, features_, data);
  }

  // The number of segments, if no array has them as a dimension.
  void Segments(int64_t num_segments) {
    Problem& problem = call_.problem;
    const int64_t width = std::max<int64_t>(1, problem.features), max_cells = int64_t{1} << 56;
    if (num_segments < 0 || num_segments > max_cells / width / std::max<int64_t>(1, problem.batch)) {
      throw InvalidArgument("num_segments is " + std::to_string(num_segments) +
                            ", expected a non-negative number of segments that memory can hold");
    }
    problem.segments = num_segments;
  }

  // An array [.., extent, features...].
  template <typename To>
  void Array(const Buffer& buffer, DataType type, int64_t extent, IntegerSpan features, To* data) const {
    buffer.CheckType(type);
    const auto view = batch_.View(buffer, kMayBeShared<To>);
    if (!view || view->dims.size() != 1 + features.size() || view->dims[0] != extent ||
        !(view->dims.last(features.size()) == features)) {
      throw batch_.WrongShape(buffer, kMayBeShared<To>,
                              std::to_string(extent) + (features.size() == 0 ? "" : ",") + TextOf(features));
    }
    Set(buffer, *view, data);
  }

  // An array with the shape of another one, which is checked: the batch shares both or neither.
  void Like(const Buffer& other, const Buffer& buffer, DataType type, BatchOperand* data) const {
    buffer.CheckType(type);
    if (!(buffer.dims == other.dims)) {
      throw buffer.WrongShape("that of " + std::string(other.name) + " " + ShapeString(other.dims));
    }
    Set(buffer, *batch_.View(buffer, /*may_be_shared=*/true), data);
  }

  // An array [.., extent].
  template <typename To>
  void Vector(const Buffer& buffer, DataType type, int64_t extent, To* data) const {
    Array(buffer, type, extent, {}, data);
  }

  // (data, segment_ids) -> output, one value per cell.
  void Reduction(const Buffer& data, const Buffer& segment_ids, const Buffer& output, const void** data_pointer,
                 void** output_pointer) {
    First(output, "segments, ...");
    Ids(segment_ids);
    FirstData(data, data_pointer);
    FirstCells(output, type_, output_pointer);
  }

  DataType type() const { return type_; }

 private:
  void TakeFeatures(const Buffer& buffer, const BatchView& view) {
    type_ = buffer.type;
    call_.type = ElementTypeOf(type_);
    features_ = view.dims.last(view.dims.size() - 1);
    call_.problem.features = NumElements(features_);
  }

  template <typename To>
  static constexpr bool kMayBeShared = std::is_same_v<To, BatchOperand>;

  static void Set(const Buffer& buffer, const BatchView& view, BatchOperand* operand) {
    *operand = {buffer.data, view.is_shared};
  }
  template <typename Pointer>
  static void Set(const Buffer& buffer, const BatchView& /*view*/, Pointer* data) {
    *data = static_cast<Pointer>(buffer.data);
  }

  int64_t num_batch_dims_;
  Batch batch_;
  SegmentCall& call_;
  DataType type_ = XLA_FFI_DataType_INVALID;
  IntegerSpan features_;
};

// For kernels of edges that must be sorted by segment.
inline void CheckSorted(const SegmentCall& call) {
  if (!call.indices_are_sorted) {
    throw InvalidArgument("indices_are_sorted is false, expected true: segment_order brings edges into order");
  }
}

}  // namespace jax_baracuda::segment
