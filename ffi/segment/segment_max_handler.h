// Checks the buffers of segment_max and its gradient and turns them into a Problem; used by both back ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "ffi/core/handler.h"
#include "ffi/segment/segment_max.h"

namespace jax_baracuda::segment {

// `data_like` is data [batch or 1, rows, ...] (or its cotangent), `cells` has the shape of the result
// [batch, segments, ...]. Both back ends read every shape through this function.
inline ffi::Error DecodeProblem(const char* op, const char* data_name, const ffi::AnyBuffer& data_like,
                                const ffi::AnyBuffer& segment_ids, const char* cells_name,
                                const ffi::AnyBuffer& cells, int64_t batch, Problem* problem, bool* ids_are_64_bit) {
  const auto data_shape = data_like.dimensions(), ids_shape = segment_ids.dimensions(),
             cells_shape = cells.dimensions();
  if (ids_shape.size() != 2 || !IsBatchOrShared(ids_shape[0], batch)) {
    return WrongShape(op, "segment_ids", segment_ids, "[batch or 1, rows] with batch = " + std::to_string(batch));
  }
  if (data_shape.size() < 2 || data_shape[1] != ids_shape[1] || !IsBatchOrShared(data_shape[0], batch)) {
    return WrongShape(op, data_name, data_like,
                      "[batch or 1, " + std::to_string(ids_shape[1]) + " rows, ...] with batch = " +
                          std::to_string(batch));
  }
  if (cells_shape.size() != data_shape.size() || !IsBatchOrShared(cells_shape[0], batch) ||
      !std::equal(cells_shape.begin() + 2, cells_shape.end(), data_shape.begin() + 2)) {
    return WrongShape(op, cells_name, cells, std::string("[batch, segments, ...] with the trailing dimensions of ") +
                                                 data_name + " " + ShapeString(data_shape));
  }
  switch (segment_ids.element_type()) {
    case ffi::DataType::S32:
      *ids_are_64_bit = false;
      break;
    case ffi::DataType::S64:
      *ids_are_64_bit = true;
      break;
    default:
      return UnsupportedType(op, "segment_ids", segment_ids.element_type());
  }
  if (ids_shape[1] >= std::numeric_limits<int32_t>::max()) {
    return InvalidArgument(op, "segment_ids has " + std::to_string(ids_shape[1]) +
                                   " rows; at most 2147483646 are supported");
  }
  *problem = Problem{batch,
                     ids_shape[1],
                     cells_shape[1],
                     TrailingSize(data_like, 2),
                     /*data_is_shared=*/data_shape[0] != batch,
                     /*ids_are_shared=*/ids_shape[0] != batch};
  return ffi::Error::Success();
}

inline ffi::Error CheckSame(const char* op, const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                            ffi::AnyBuffer::Dimensions shape) {
  if (buffer.element_type() != type) return UnsupportedType(op, name, buffer.element_type());
  if (buffer.dimensions().size() != shape.size() ||
      !std::equal(shape.begin(), shape.end(), buffer.dimensions().begin())) {
    return WrongShape(op, name, buffer, ShapeString(shape));
  }
  return ffi::Error::Success();
}

struct ForwardBuffers {
  Problem problem;
  ElementType type;
  bool ids_are_64_bit;
  int32_t* winner;
};

// `winner` is the optional second result (nullptr where only the maximum is wanted).
inline ffi::Error DecodeForward(const char* op, const ffi::AnyBuffer& data, const ffi::AnyBuffer& segment_ids,
                                const ffi::AnyBuffer& output, const ffi::AnyBuffer* winner, ForwardBuffers* decoded) {
  if (output.dimensions().size() < 2) return WrongShape(op, "output", output, "[batch, segments, ...]");
  JB_RETURN_IF_ERROR(DecodeProblem(op, "data", data, segment_ids, "output", output, output.dimensions()[0],
                                   &decoded->problem, &decoded->ids_are_64_bit));
  if (output.element_type() != data.element_type()) return UnsupportedType(op, "output", output.element_type());
  decoded->type = ElementTypeOf(data.element_type());
  decoded->winner = nullptr;
  if (winner != nullptr) {
    JB_RETURN_IF_ERROR(CheckSame(op, "winner", *winner, ffi::DataType::S32, output.dimensions()));
    decoded->winner = static_cast<int32_t*>(winner->untyped_data());
  }
  return ffi::Error::Success();
}

struct BackwardBuffers {
  Problem problem;
  ElementType type;
  bool ids_are_64_bit;
  bool d_output_is_shared;
  bool winner_is_shared;
  const void* data = nullptr;    // absent when no winner can be a tie
  const void* output = nullptr;  // likewise
};

// The operands are (d_output, winner, segment_ids) and, where ties are shared, data and output.
inline ffi::Error DecodeBackward(const char* op, const ffi::AnyBuffer& d_output, const ffi::AnyBuffer& winner,
                                 const ffi::AnyBuffer& segment_ids, ffi::RemainingArgs data_and_output,
                                 const ffi::AnyBuffer& d_data, BackwardBuffers* decoded) {
  if (d_data.dimensions().size() < 2) return WrongShape(op, "d_data", d_data, "[batch, rows, ...]");
  const int64_t batch = d_data.dimensions()[0];
  JB_RETURN_IF_ERROR(DecodeProblem(op, "d_data", d_data, segment_ids, "d_output", d_output, batch, &decoded->problem,
                                   &decoded->ids_are_64_bit));
  if (d_output.element_type() != d_data.element_type()) {
    return UnsupportedType(op, "d_output", d_output.element_type());
  }
  // Everything indexed by segment has the shape of d_output but for its leading dimension, batch or 1.
  const auto check_cells = [&](const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type) -> ffi::Error {
    const auto shape = buffer.dimensions(), expected = d_output.dimensions();
    if (buffer.element_type() != type) return UnsupportedType(op, name, buffer.element_type());
    if (shape.size() != expected.size() || !IsBatchOrShared(shape[0], batch) ||
        !std::equal(shape.begin() + 1, shape.end(), expected.begin() + 1)) {
      return WrongShape(op, name, buffer, "that of d_output " + ShapeString(expected));
    }
    return ffi::Error::Success();
  };
  JB_RETURN_IF_ERROR(check_cells("winner", winner, ffi::DataType::S32));
  decoded->type = ElementTypeOf(d_data.element_type());
  decoded->d_output_is_shared = d_output.dimensions()[0] != batch;
  decoded->winner_is_shared = winner.dimensions()[0] != batch;
  if (data_and_output.size() == 0) return ffi::Error::Success();
  if (data_and_output.size() != 2) return InvalidArgument(op, "expected both data and output, or neither");
  const auto data = data_and_output.get<ffi::AnyBuffer>(0), output = data_and_output.get<ffi::AnyBuffer>(1);
  if (data.has_error()) return data.error();
  if (output.has_error()) return output.error();
  JB_RETURN_IF_ERROR(check_cells("output", *output, d_output.element_type()));
  const auto data_shape = data->dimensions(), d_data_shape = d_data.dimensions();
  if (data->element_type() != d_data.element_type()) return UnsupportedType(op, "data", data->element_type());
  if (data_shape.size() != d_data_shape.size() || !IsBatchOrShared(data_shape[0], batch) ||
      !std::equal(data_shape.begin() + 1, data_shape.end(), d_data_shape.begin() + 1)) {
    return WrongShape(op, "data", *data, "that of d_data " + ShapeString(d_data_shape));
  }
  if ((output->dimensions()[0] != batch) != decoded->winner_is_shared) {
    return WrongShape(op, "output", *output, "that of winner " + ShapeString(winner.dimensions()));
  }
  decoded->problem.data_is_shared = data_shape[0] != batch;
  decoded->data = data->untyped_data();
  decoded->output = output->untyped_data();
  return ffi::Error::Success();
}

}  // namespace jax_baracuda::segment
