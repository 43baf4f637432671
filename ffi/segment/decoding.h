// Shared by the handlers of the segment ops: attributes and buffer checks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "ffi/core/batch.h"
#include "ffi/core/batch_operand.h"
#include "ffi/core/handler.h"
#include "ffi/core/operands.h"
#include "ffi/core/run.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// Op attributes.
struct GatherOptions {
  int64_t num_batch_dims;
};

struct ReductionOptions {
  int64_t num_batch_dims;
  bool indices_are_sorted;
};

struct WinnerOptions {
  int64_t num_batch_dims;
  bool indices_are_sorted, first_wins;
};

struct SumOptions {
  int64_t num_batch_dims;
  bool indices_are_sorted, deterministic;
};

struct SoftmaxOptions {
  int64_t num_batch_dims, num_segments;
  bool indices_are_sorted;
};

}  // namespace jax_baracuda::segment

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::GatherOptions, StructMember<int64_t>("num_batch_dims"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::ReductionOptions, StructMember<int64_t>("num_batch_dims"),
                                      StructMember<bool>("indices_are_sorted"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::WinnerOptions, StructMember<int64_t>("num_batch_dims"),
                                      StructMember<bool>("indices_are_sorted"), StructMember<bool>("first_wins"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::SumOptions, StructMember<int64_t>("num_batch_dims"),
                                      StructMember<bool>("indices_are_sorted"), StructMember<bool>("deterministic"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::SoftmaxOptions, StructMember<int64_t>("num_batch_dims"),
                                      StructMember<int64_t>("num_segments"), StructMember<bool>("indices_are_sorted"));

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
  Decoder(const char* op, int64_t num_batch_dims, SegmentCall* call)
      : op_(op), num_batch_dims_(num_batch_dims), batch_(op), call_(*call) {}

  // Any result; it determines the batch size.
  ffi::Error First(const char* name, const ffi::AnyBuffer& result, const char* trailing) {
    JB_RETURN_IF_ERROR(batch_.Decode(name, result, num_batch_dims_, trailing));
    if (batch_.View(result, /*may_be_shared=*/false)->dims.size() == 0) {
      return batch_.WrongRank(name, result, trailing);
    }
    call_.problem.batch = batch_.size();
    return ffi::Error::Success();
  }

  ffi::Error Ids(const ffi::AnyBuffer& segment_ids, const char* name = "segment_ids") {
    Problem& problem = call_.problem;
    const auto view = batch_.View(segment_ids, /*may_be_shared=*/true);
    if (!view || view->dims.size() != 1) return batch_.WrongShape(name, segment_ids, /*may_be_shared=*/true, "rows");
    if (view->type != ffi::DataType::S32 && view->type != ffi::DataType::S64) {
      return UnsupportedType(op_, name, view->type);
    }
    if (view->dims[0] >= std::numeric_limits<int32_t>::max()) {
      return InvalidArgument(
          op_, std::string(name) + " has " + std::to_string(view->dims[0]) + " rows; at most 2147483646 are supported");
    }
    call_.segment_ids = view->data;
    call_.ids_are_64_bit = view->type == ffi::DataType::S64;
    problem.rows = view->dims[0];
    problem.ids_are_shared = view->is_shared;
    return ffi::Error::Success();
  }

  // The array [.., rows, ...] that determines the trailing dimensions and the element type.
  template <typename To>
  ffi::Error FirstRows(const char* name, const ffi::AnyBuffer& buffer, To* data) {
    const auto view = batch_.View(buffer, kMayBeShared<To>);
    if (!view || view->dims.size() == 0 || view->dims[0] != call_.problem.rows) {
      return batch_.WrongShape(name, buffer, kMayBeShared<To>, std::to_string(call_.problem.rows) + " rows, ...");
    }
    Take(*view, data);
    TakeFeatures(*view);
    return ffi::Error::Success();
  }

  // FirstRows of the operand `data`.
  ffi::Error FirstData(const ffi::AnyBuffer& buffer, const void** data) {
    BatchOperand operand;
    JB_RETURN_IF_ERROR(FirstRows("data", buffer, &operand));
    *data = operand.data;
    call_.problem.data_is_shared = operand.is_shared;
    return ffi::Error::Success();
  }

  // The edges of a call that gathers from `data`.
  ffi::Error Edges(const ffi::AnyBuffer& data, const ffi::AnyBuffer& gather_ids, const ffi::AnyBuffer& segment_ids,
                   GatheringCall* call) {
    JB_RETURN_IF_ERROR(Ids(segment_ids));
    return Gathered("data", data, "gather_ids", gather_ids, call);
  }

  // The array [.., num_rows, ...] that edges gather from, and the ids by which they gather. The array determines the
  // trailing dimensions and the element type. Call it after Ids.
  ffi::Error Gathered(const char* name, const ffi::AnyBuffer& data, const char* ids_name,
                      const ffi::AnyBuffer& gather_ids, GatheringCall* call) {
    const auto view = batch_.View(data, /*may_be_shared=*/true);
    if (!view || view->dims.size() == 0) return batch_.WrongShape(name, data, /*may_be_shared=*/true, "rows, ...");
    Take(*view, &call->data);
    call_.problem.data_is_shared = view->is_shared;
    call->num_rows = view->dims[0];
    TakeFeatures(*view);
    return EdgeIds(ids_name, gather_ids, &call->gather_ids);
  }

  // The optional operand `edge_order`.
  ffi::Error EdgeOrder(bool is_there, OptionalOperands* operands, GatheringCall* call) const {
    return operands->Next("edge_order", is_there, [&](const ffi::AnyBuffer& edge_order) {
      return EdgeIds("edge_order", edge_order, &call->edge_order);
    });
  }

  // int32 [.., edges].
  ffi::Error EdgeIds(const char* name, const ffi::AnyBuffer& buffer, BatchOperand* ids) const {
    return Vector(name, buffer, ffi::DataType::S32, call_.problem.rows, ids);
  }

  // The trailing dimensions of the rows as (heads, features per head).
  ffi::Error Heads(const char* name, int64_t* heads) const {
    if (features_.size() != 2) {
      return InvalidArgument(op_, std::string(name) + " has " + std::to_string(features_.size()) +
                                      " dimensions of features, expected heads and features of a head");
    }
    *heads = features_[0];
    return ffi::Error::Success();
  }

  // The trailing dimensions of data.
  ffi::AnyBuffer::Dimensions features() const { return features_; }

  template <typename To>
  ffi::Error Rows(const char* name, const ffi::AnyBuffer& buffer, To* data) const {
    return Array(name, buffer, type_, call_.problem.rows, features_, data);
  }

  // The array [.., segments, ...] that determines the number of segments.
  template <typename To>
  ffi::Error FirstCells(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, To* data) {
    const auto view = batch_.View(buffer, kMayBeShared<To>);
    if (!view || view->dims.size() == 0) {
      return batch_.WrongShape(name, buffer, kMayBeShared<To>, "segments, ...");
    }
    call_.problem.segments = view->dims[0];
    return Cells(name, buffer, type, data);
  }

  template <typename To>
  ffi::Error Cells(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, To* data) const {
    return Array(name, buffer, type, call_.problem.segments, features_, data);
  }

  // The number of segments, if no array has them as a dimension.
  ffi::Error Segments(int64_t num_segments) {
    Problem& problem = call_.problem;
    const int64_t width = std::max<int64_t>(1, problem.features), max_cells = int64_t{1} << 56;
    if (num_segments < 0 || num_segments > max_cells / width / std::max<int64_t>(1, problem.batch)) {
      return InvalidArgument(op_, "num_segments is " + std::to_string(num_segments) +
                                      ", expected a non-negative number of segments that memory can hold");
    }
    problem.segments = num_segments;
    return ffi::Error::Success();
  }

  // An array [.., extent, features...].
  template <typename To>
  ffi::Error Array(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t extent,
                   ffi::AnyBuffer::Dimensions features, To* data) const {
    if (buffer.element_type() != type) return UnsupportedType(op_, name, buffer.element_type());
    const auto view = batch_.View(buffer, kMayBeShared<To>);
    if (!view || view->dims.size() != 1 + features.size() || view->dims[0] != extent ||
        !(view->dims.last(features.size()) == features)) {
      return batch_.WrongShape(name, buffer, kMayBeShared<To>,
                               std::to_string(extent) + (features.size() == 0 ? "" : ",") + TextOf(features));
    }
    Take(*view, data);
    return ffi::Error::Success();
  }

  // An array with the shape of another one, which is checked: the batch shares both or neither.
  ffi::Error Like(const char* other_name, const ffi::AnyBuffer& other, const char* name, const ffi::AnyBuffer& buffer,
                  ffi::DataType type, BatchOperand* data) const {
    if (buffer.element_type() != type) return UnsupportedType(op_, name, buffer.element_type());
    if (!(buffer.dimensions() == other.dimensions())) {
      return WrongShape(op_, name, buffer,
                        "that of " + std::string(other_name) + " " + ShapeString(other.dimensions()));
    }
    Take(*batch_.View(buffer, /*may_be_shared=*/true), data);
    return ffi::Error::Success();
  }

  // An array [.., extent].
  template <typename To>
  ffi::Error Vector(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t extent,
                    To* data) const {
    return Array(name, buffer, type, extent, {}, data);
  }

  // (data, segment_ids) -> output, one value per cell.
  ffi::Error Reduction(const ffi::AnyBuffer& data, const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& output,
                       const void** data_pointer, void** output_pointer) {
    JB_RETURN_IF_ERROR(First("output", output, "segments, ..."));
    JB_RETURN_IF_ERROR(Ids(segment_ids));
    JB_RETURN_IF_ERROR(FirstData(data, data_pointer));
    return FirstCells("output", output, type_, output_pointer);
  }

  ffi::DataType type() const { return type_; }

 private:
  void TakeFeatures(const BatchedBuffer& view) {
    type_ = view.type;
    call_.type = ElementTypeOf(type_);
    features_ = view.dims.last(view.dims.size() - 1);
    call_.problem.features = 1;
    for (const int64_t size : features_) call_.problem.features = MultiplySizes(call_.problem.features, size);
  }

  template <typename To>
  static constexpr bool kMayBeShared = std::is_same_v<To, BatchOperand>;

  static void Take(const BatchedBuffer& view, BatchOperand* operand) { *operand = {view.data, view.is_shared}; }
  template <typename Pointer>
  static void Take(const BatchedBuffer& view, Pointer* data) {
    *data = static_cast<Pointer>(view.data);
  }

  const char* op_;
  int64_t num_batch_dims_;
  Batch batch_;
  SegmentCall& call_;
  ffi::DataType type_;
  ffi::AnyBuffer::Dimensions features_;
};

// For kernels of edges that must be sorted by segment.
inline ffi::Error CheckSorted(const char* op, const SegmentCall& call) {
  if (call.indices_are_sorted) return ffi::Error::Success();
  return InvalidArgument(op, "indices_are_sorted is false, expected true: segment_order brings edges into order");
}

inline ffi::Error CheckKernel(const char* op, const char* name, const ffi::AnyBuffer& buffer, bool has_kernel) {
  return has_kernel ? ffi::Error::Success() : UnsupportedType(op, name, buffer.element_type());
}

}  // namespace jax_baracuda::segment
