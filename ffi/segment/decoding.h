// Checks the buffers of the segment ops and turns them into a Problem; used by both back ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "ffi/core/batch.h"
#include "ffi/core/handler.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// Whether the batch shares all the operands with features of a call whose plan is asked for.
inline bool ValuesAreShared(const PlanParameters& parameters) {
  for (const char* name : {"data", "logits", "probabilities", "d_output"}) {
    const auto flag = parameters.find(std::string(name) + "_is_shared");
    if (flag != parameters.end() && flag->second == 0) return false;
  }
  return true;
}

// What jax_baracuda/ops/segment says about a call when it asks for its plan.
struct PlanRequest {
  explicit PlanRequest(const PlanParameters& parameters)
      : element_bytes(parameters.at("element_bytes")),
        is_floating(parameters.at("is_floating") != 0),
        indices_are_sorted(parameters.at("indices_are_sorted") != 0),
        deterministic(parameters.at("deterministic") != 0),
        has_order(parameters.at("has_order") != 0),
        shares_ties(parameters.at("shares_ties") != 0) {
    problem.batch = parameters.at("batch");
    problem.rows = parameters.at("rows");
    problem.segments = parameters.at("segments");
    problem.features = parameters.at("features");
    problem.data_is_shared = ValuesAreShared(parameters);
    problem.ids_are_shared = parameters.at("segment_ids_is_shared") != 0;
  }

  Problem problem;
  int64_t element_bytes;
  bool is_floating;
  bool indices_are_sorted;
  bool deterministic;
  bool has_order;    // of the gradient of an extremum
  bool shares_ties;  // likewise: with data and output
};

// What every op of the family decodes. Whether the element type has a kernel is left to the dispatch.
struct Buffers {
  Problem problem;
  ElementType type;  // of data, or of its cotangent
  bool ids_are_64_bit;
};

inline ffi::DataType ComputeDataType(ffi::DataType type) {
  return type == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32;
}

// Checks the buffers of one call, one after another. First, Ids and FirstRows come first, in this order: they tell what
// the others must fit. Where `is_shared` is nullptr, an array must have the whole batch; else *is_shared tells whether
// the batch shares it.
class Decoder {
 public:
  Decoder(const char* op, int64_t num_batch_dims, Buffers* buffers)
      : op_(op), num_batch_dims_(num_batch_dims), batch_(op), buffers_(*buffers) {}

  // Any result tells the batch.
  ffi::Error First(const char* name, const ffi::AnyBuffer& result, const char* trailing) {
    JB_RETURN_IF_ERROR(batch_.Decode(name, result, num_batch_dims_, trailing));
    if (batch_.View(result, /*may_be_shared=*/false)->dims.size() == 0) {
      return batch_.WrongRank(name, result, trailing);
    }
    buffers_.problem = Problem{};
    buffers_.problem.batch = batch_.size();
    return ffi::Error::Success();
  }

  ffi::Error Ids(const ffi::AnyBuffer& segment_ids) {
    Problem& problem = buffers_.problem;
    const auto view = batch_.View(segment_ids, /*may_be_shared=*/true);
    if (!view || view->dims.size() != 1) {
      return batch_.WrongShape("segment_ids", segment_ids, /*may_be_shared=*/true, "rows");
    }
    if (view->type != ffi::DataType::S32 && view->type != ffi::DataType::S64) {
      return UnsupportedType(op_, "segment_ids", view->type);
    }
    if (view->dims[0] >= std::numeric_limits<int32_t>::max()) {
      return InvalidArgument(op_, "segment_ids has " + std::to_string(view->dims[0]) +
                                      " rows; at most 2147483646 are supported");
    }
    buffers_.ids_are_64_bit = view->type == ffi::DataType::S64;
    problem.rows = view->dims[0];
    problem.ids_are_shared = view->is_shared;
    return ffi::Error::Success();
  }

  // The array [.., rows, ...] that tells the trailing dimensions and the element type.
  ffi::Error FirstRows(const char* name, const ffi::AnyBuffer& buffer, bool* is_shared = nullptr) {
    Problem& problem = buffers_.problem;
    const auto view = batch_.View(buffer, is_shared != nullptr);
    if (!view || view->dims.size() == 0 || view->dims[0] != problem.rows) {
      return batch_.WrongShape(name, buffer, is_shared != nullptr, std::to_string(problem.rows) + " rows, ...");
    }
    if (is_shared != nullptr) *is_shared = view->is_shared;
    type_ = view->type;
    buffers_.type = ElementTypeOf(type_);
    features_ = view->dims.last(view->dims.size() - 1);
    problem.features = 1;
    for (const int64_t size : features_) problem.features = MultiplySizes(problem.features, size);
    return ffi::Error::Success();
  }

  ffi::Error Rows(const char* name, const ffi::AnyBuffer& buffer, bool* is_shared = nullptr) const {
    return Array(name, buffer, type_, buffers_.problem.rows, features_, is_shared);
  }

  // The array [.., segments, ...] that tells the number of segments.
  ffi::Error FirstCells(const char* name, const ffi::AnyBuffer& buffer, bool* is_shared = nullptr) {
    const auto view = batch_.View(buffer, is_shared != nullptr);
    if (!view || view->dims.size() == 0) {
      return batch_.WrongShape(name, buffer, is_shared != nullptr, "segments, ...");
    }
    buffers_.problem.segments = view->dims[0];
    return Cells(name, buffer, type_, is_shared);
  }

  ffi::Error Cells(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                   bool* is_shared = nullptr) const {
    return Array(name, buffer, type, buffers_.problem.segments, features_, is_shared);
  }

  // The number of segments where no array has them as a dimension.
  ffi::Error Segments(int64_t num_segments) {
    Problem& problem = buffers_.problem;
    const int64_t width = std::max<int64_t>(1, problem.features), most_cells = int64_t{1} << 56;
    if (num_segments < 0 || num_segments > most_cells / width / std::max<int64_t>(1, problem.batch)) {
      return InvalidArgument(op_, "num_segments is " + std::to_string(num_segments) +
                                      ", expected a non-negative number of segments that memory can hold");
    }
    problem.segments = num_segments;
    return ffi::Error::Success();
  }

  // An array [.., extent] and these features.
  ffi::Error Array(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t extent,
                   ffi::AnyBuffer::Dimensions features, bool* is_shared = nullptr) const {
    if (buffer.element_type() != type) return UnsupportedType(op_, name, buffer.element_type());
    const auto view = batch_.View(buffer, is_shared != nullptr);
    if (!view || view->dims.size() != 1 + features.size() || view->dims[0] != extent ||
        !(view->dims.last(features.size()) == features)) {
      return batch_.WrongShape(name, buffer, is_shared != nullptr,
                               std::to_string(extent) + (features.size() == 0 ? "" : ",") + TextOf(features));
    }
    if (is_shared != nullptr) *is_shared = view->is_shared;
    return ffi::Error::Success();
  }

  // An array [.., extent].
  ffi::Error Vector(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t extent,
                    bool* is_shared = nullptr) const {
    return Array(name, buffer, type, extent, {}, is_shared);
  }

  const Batch& batch() const { return batch_; }
  ffi::DataType type() const { return type_; }

 private:
  const char* op_;
  int64_t num_batch_dims_;
  Batch batch_;
  Buffers& buffers_;
  ffi::DataType type_;
  ffi::AnyBuffer::Dimensions features_;
};

// The order of rows that segment_max_with_winner hands to the backward pass: [.., rows], or [.., 1] where it has none.
inline ffi::Error DecodeOrder(const Decoder& decoder, const Problem& problem, const ffi::AnyBuffer& order,
                              int64_t* order_size, bool* is_shared = nullptr) {
  const auto dimensions = order.dimensions();
  const bool is_absent = dimensions.size() > 0 && dimensions.back() == 1;
  *order_size = is_absent ? 1 : problem.rows;
  return decoder.Vector("order", order, ffi::DataType::S32, *order_size, is_shared);
}

// (data, segment_ids) -> output, one value per cell.
inline ffi::Error DecodeCells(Decoder& decoder, Problem* problem, const ffi::AnyBuffer& data,
                              const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& output) {
  JB_RETURN_IF_ERROR(decoder.First("output", output, "segments, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("data", data, &problem->data_is_shared));
  return decoder.FirstCells("output", output);
}

// segment_max, segment_min, and with winner.
struct ForwardBuffers : Buffers {
  int32_t* winner = nullptr;
  int32_t* order = nullptr;
  int64_t order_size = 0;  // rows, or 1 where no order is wanted
};

// `winner` and `order` are the optional second and third result (nullptr where only the extremum is wanted).
inline ffi::Error DecodeForward(const char* op, int64_t num_batch_dims, const ffi::AnyBuffer& data,
                                const ffi::AnyBuffer& segment_ids,
                                const ffi::AnyBuffer& output, const ffi::AnyBuffer* winner,
                                const ffi::AnyBuffer* order, ForwardBuffers* decoded) {
  Decoder decoder(op, num_batch_dims, decoded);
  JB_RETURN_IF_ERROR(DecodeCells(decoder, &decoded->problem, data, segment_ids, output));
  if (winner != nullptr) {
    JB_RETURN_IF_ERROR(decoder.Cells("winner", *winner, ffi::DataType::S32));
    decoded->winner = static_cast<int32_t*>(winner->untyped_data());
  }
  if (order != nullptr) {
    JB_RETURN_IF_ERROR(DecodeOrder(decoder, decoded->problem, *order, &decoded->order_size));
    decoded->order = static_cast<int32_t*>(order->untyped_data());
  }
  return ffi::Error::Success();
}

// segment_max_backward, segment_min_backward.
struct BackwardBuffers : Buffers {
  bool d_output_is_shared;
  bool winner_is_shared;  // output likewise
  bool order_is_shared;
  int64_t order_size;            // rows, or 1 where there is no order
  const void* data = nullptr;    // absent when no winner can be a tie
  const void* output = nullptr;  // likewise
};

// The operands are (d_output, winner, segment_ids, order) and, where ties are shared, data and output.
inline ffi::Error DecodeBackward(const char* op, int64_t num_batch_dims, const ffi::AnyBuffer& d_output,
                                 const ffi::AnyBuffer& winner,
                                 const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& order,
                                 ffi::RemainingArgs data_and_output, const ffi::AnyBuffer& d_data,
                                 BackwardBuffers* decoded) {
  Decoder decoder(op, num_batch_dims, decoded);
  JB_RETURN_IF_ERROR(decoder.First("d_data", d_data, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("d_data", d_data));
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_output", d_output, &decoded->d_output_is_shared));
  JB_RETURN_IF_ERROR(decoder.Cells("winner", winner, ffi::DataType::S32, &decoded->winner_is_shared));
  JB_RETURN_IF_ERROR(
      DecodeOrder(decoder, decoded->problem, order, &decoded->order_size, &decoded->order_is_shared));
  if (data_and_output.size() == 0) return ffi::Error::Success();
  if (data_and_output.size() != 2) return InvalidArgument(op, "expected both data and output, or neither");
  const auto data = data_and_output.get<ffi::AnyBuffer>(0), output = data_and_output.get<ffi::AnyBuffer>(1);
  if (data.has_error()) return data.error();
  if (output.has_error()) return output.error();
  JB_RETURN_IF_ERROR(decoder.Rows("data", *data, &decoded->problem.data_is_shared));
  bool output_is_shared;
  JB_RETURN_IF_ERROR(decoder.Cells("output", *output, decoder.type(), &output_is_shared));
  if (output_is_shared != decoded->winner_is_shared) {
    return WrongShape(op, "output", *output, "that of winner " + ShapeString(winner.dimensions()));
  }
  decoded->data = data->untyped_data();
  decoded->output = output->untyped_data();
  return ffi::Error::Success();
}

// segment_argmax, segment_argmin.
inline ffi::Error DecodeArg(const char* op, int64_t num_batch_dims, const ffi::AnyBuffer& data,
                            const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& winner, Buffers* decoded) {
  Decoder decoder(op, num_batch_dims, decoded);
  JB_RETURN_IF_ERROR(decoder.First("winner", winner, "segments, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("data", data, &decoded->problem.data_is_shared));
  decoded->problem.segments = decoder.batch().View(winner, /*may_be_shared=*/false)->dims[0];
  return decoder.Cells("winner", winner, ffi::DataType::S32);
}

// segment_sum, segment_mean.
struct SumBuffers : Buffers {
  int32_t* count = nullptr;  // [batch, segments]
};

// `count` is the optional second result (nullptr for a sum).
inline ffi::Error DecodeSum(const char* op, int64_t num_batch_dims, const ffi::AnyBuffer& data,
                            const ffi::AnyBuffer& segment_ids,
                            const ffi::AnyBuffer& output, const ffi::AnyBuffer* count, SumBuffers* decoded) {
  Decoder decoder(op, num_batch_dims, decoded);
  JB_RETURN_IF_ERROR(DecodeCells(decoder, &decoded->problem, data, segment_ids, output));
  if (count != nullptr) {
    JB_RETURN_IF_ERROR(decoder.Vector("count", *count, ffi::DataType::S32, decoded->problem.segments));
    decoded->count = static_cast<int32_t*>(count->untyped_data());
  }
  return ffi::Error::Success();
}

// segment_sum_backward, segment_mean_backward.
struct GatherBuffers : Buffers {
  const int32_t* count = nullptr;  // [batch or 1, segments]
  bool d_output_is_shared;
  bool count_is_shared;
};

// `count` is nullptr for a sum.
inline ffi::Error DecodeGather(const char* op, int64_t num_batch_dims, const ffi::AnyBuffer& d_output,
                               const ffi::AnyBuffer* count,
                               const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& d_data,
                               GatherBuffers* decoded) {
  Decoder decoder(op, num_batch_dims, decoded);
  JB_RETURN_IF_ERROR(decoder.First("d_data", d_data, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("d_data", d_data));
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_output", d_output, &decoded->d_output_is_shared));
  decoded->count_is_shared = false;
  if (count != nullptr) {
    JB_RETURN_IF_ERROR(decoder.Vector("count", *count, ffi::DataType::S32, decoded->problem.segments,
                                      &decoded->count_is_shared));
    decoded->count = static_cast<const int32_t*>(count->untyped_data());
  }
  return ffi::Error::Success();
}

// segment_prod, segment_prod_with_residual.
struct ProductBuffers : Buffers {
  void* mantissa = nullptr;  // of the compute type
  int32_t* packed = nullptr;
};

// `mantissa` and `packed` are the optional second and third result (nullptr where only the product is wanted).
inline ffi::Error DecodeProduct(const char* op, int64_t num_batch_dims, const ffi::AnyBuffer& data,
                                const ffi::AnyBuffer& segment_ids,
                                const ffi::AnyBuffer& output, const ffi::AnyBuffer* mantissa,
                                const ffi::AnyBuffer* packed, ProductBuffers* decoded) {
  Decoder decoder(op, num_batch_dims, decoded);
  JB_RETURN_IF_ERROR(DecodeCells(decoder, &decoded->problem, data, segment_ids, output));
  if (mantissa != nullptr) {
    JB_RETURN_IF_ERROR(decoder.Cells("mantissa", *mantissa, ComputeDataType(decoder.type())));
    decoded->mantissa = mantissa->untyped_data();
  }
  if (packed != nullptr) {
    JB_RETURN_IF_ERROR(decoder.Cells("packed", *packed, ffi::DataType::S32));
    decoded->packed = static_cast<int32_t*>(packed->untyped_data());
  }
  return ffi::Error::Success();
}

struct ProductBackwardBuffers : Buffers {
  bool d_output_is_shared;
  bool product_is_shared;  // mantissa and packed
};

inline ffi::Error DecodeProductBackward(const char* op, int64_t num_batch_dims, const ffi::AnyBuffer& d_output,
                                        const ffi::AnyBuffer& mantissa,
                                        const ffi::AnyBuffer& packed, const ffi::AnyBuffer& data,
                                        const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& d_data,
                                        ProductBackwardBuffers* decoded) {
  Decoder decoder(op, num_batch_dims, decoded);
  JB_RETURN_IF_ERROR(decoder.First("d_data", d_data, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("d_data", d_data));
  JB_RETURN_IF_ERROR(decoder.Rows("data", data, &decoded->problem.data_is_shared));
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_output", d_output, &decoded->d_output_is_shared));
  bool packed_is_shared;
  JB_RETURN_IF_ERROR(
      decoder.Cells("mantissa", mantissa, ComputeDataType(decoder.type()), &decoded->product_is_shared));
  JB_RETURN_IF_ERROR(decoder.Cells("packed", packed, ffi::DataType::S32, &packed_is_shared));
  if (packed_is_shared != decoded->product_is_shared) {
    return WrongShape(op, "packed", packed, "that of mantissa " + ShapeString(mantissa.dimensions()));
  }
  return ffi::Error::Success();
}

inline ffi::Error DecodeSoftmax(const char* op, int64_t num_batch_dims, const ffi::AnyBuffer& logits,
                                const ffi::AnyBuffer& segment_ids,
                                const ffi::AnyBuffer& probabilities, int64_t num_segments, Buffers* decoded) {
  Decoder decoder(op, num_batch_dims, decoded);
  JB_RETURN_IF_ERROR(decoder.First("probabilities", probabilities, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("logits", logits, &decoded->problem.data_is_shared));
  JB_RETURN_IF_ERROR(decoder.Rows("probabilities", probabilities));
  return decoder.Segments(num_segments);
}

struct SoftmaxBackwardBuffers : Buffers {  // problem.data_is_shared is that of probabilities
  bool d_probabilities_are_shared;
};

inline ffi::Error DecodeSoftmaxBackward(const char* op, int64_t num_batch_dims, const ffi::AnyBuffer& probabilities,
                                        const ffi::AnyBuffer& d_probabilities, const ffi::AnyBuffer& segment_ids,
                                        const ffi::AnyBuffer& d_logits, int64_t num_segments,
                                        SoftmaxBackwardBuffers* decoded) {
  Decoder decoder(op, num_batch_dims, decoded);
  JB_RETURN_IF_ERROR(decoder.First("d_logits", d_logits, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("probabilities", probabilities, &decoded->problem.data_is_shared));
  JB_RETURN_IF_ERROR(decoder.Rows("d_probabilities", d_probabilities, &decoded->d_probabilities_are_shared));
  JB_RETURN_IF_ERROR(decoder.Rows("d_logits", d_logits));
  return decoder.Segments(num_segments);
}

}  // namespace jax_baracuda::segment
