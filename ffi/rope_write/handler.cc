// The handler of rope_write.

#include <cstdint>
#include <string>

#include "ffi/core/batch.h"
#include "ffi/core/operands.h"
#include "ffi/core/run.h"
#include "ffi/rope/decoding.h"
#include "ffi/rope_write/rope_write.h"
#include "ffi/write_rows/decoding.h"

namespace jax_baracuda::rope_write {

struct Attributes {
  int64_t axis;
  bool has_layer, has_unique_slots;
  ffi::Span<const int64_t> scales;  // the kinds of those of keys and values
  bool interleaved;
  int64_t rotary_dim, rotary_offset;
  ffi::Span<const int64_t> sections;
  bool sections_interleaved;
  double scale;
  int64_t num_batch_dims;
};

}  // namespace jax_baracuda::rope_write

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::rope_write::Attributes, StructMember<int64_t>("axis"),
                                      StructMember<bool>("has_layer"), StructMember<bool>("has_unique_slots"),
                                      StructMember<ffi::Span<const int64_t>>("scales"),
                                      StructMember<bool>("interleaved"), StructMember<int64_t>("rotary_dim"),
                                      StructMember<int64_t>("rotary_offset"),
                                      StructMember<ffi::Span<const int64_t>>("sections"),
                                      StructMember<bool>("sections_interleaved"), StructMember<double>("scale"),
                                      StructMember<int64_t>("num_batch_dims"));

namespace jax_baracuda::rope_write {
namespace {

constexpr const char* kOp = "rope_write";

// Operands are those of write_rows: the pools of keys and values, keys, values, slots, and the layer and scales if
// there are some. Then follow queries, frequencies and positions. Results are the pools and the queries.
class Decoder {
 public:
  Decoder(ffi::RemainingArgs operands, ffi::RemainingRets results, const Attributes& attributes)
      : operands_(operands), results_(results), attributes_(attributes) {}

  ffi::Error Decode(Call* call) {
    constexpr size_t kPools = 2, kOwnOperands = 3;
    if (operands_.size() < 2 * kPools + 1 + kOwnOperands || results_.size() != kPools + 1) {
      return InvalidArgument(kOp, "got " + std::to_string(operands_.size()) + " operands and " +
                                      std::to_string(results_.size()) + " results, expected at least 8 and 3");
    }
    const size_t num_written = operands_.size() - kOwnOperands;
    write_rows::Decoder decoder(kOp, operands_, num_written, results_, kPools);
    JB_RETURN_IF_ERROR(decoder.Decode(attributes_, &call->write));
    if (attributes_.axis > 1) return InvalidArgument(kOp, "axis is " + std::to_string(attributes_.axis));
    JB_RETURN_IF_ERROR(DecodeQueries(*operands_.get<ffi::AnyBuffer>(num_written), call));
    JB_RETURN_IF_ERROR(CheckRows(call->problem));
    JB_RETURN_IF_ERROR(DecodeAngles(*operands_.get<ffi::AnyBuffer>(num_written + 1),
                                    *operands_.get<ffi::AnyBuffer>(num_written + 2), call));
    call->scale = attributes_.scale;
    return ffi::Error::Success();
  }

 private:
  ffi::Error DecodeQueries(const ffi::AnyBuffer& q, Call* call) {
    const ffi::AnyBuffer result = **results_.get<ffi::AnyBuffer>(2);
    JB_RETURN_IF_ERROR(batch_.Decode("q_out", result, attributes_.num_batch_dims, "rows, heads, features"));
    const BatchedBuffer view = *batch_.View(result, /*may_be_shared=*/false);
    if (view.dims.size() != 3 || view.dims[0] != call->write.rows || batch_.size() != call->write.batch) {
      return batch_.WrongShape("q_out", result, /*may_be_shared=*/false,
                               std::to_string(call->write.rows) + ",heads,features");
    }
    type_ = view.type;
    call->type = ElementTypeOf(type_);
    if (!IsFloating(call->type)) return UnsupportedType(kOp, "q_out", type_);
    call->queries = {{}, view.data, view.dims[1]};
    JB_RETURN_IF_ERROR(batch_.Take("q", q, type_, {view.dims[0], view.dims[1], view.dims[2]}, &call->queries.x));
    rope::Problem& problem = call->problem;
    problem = rope::Problem{};
    problem.batch = batch_.size();
    problem.examples = 1;
    problem.length = view.dims[0];
    problem.features = view.dims[2];
    return rope::DecodeRotated(kOp, attributes_, &problem);
  }

  // Keys and values have the type of queries, and keys their features.
  ffi::Error CheckRows(const rope::Problem& problem) const {
    for (const size_t operand : {2, 3}) {
      const std::string name = "rows " + std::to_string(operand - 2);
      const ffi::AnyBuffer rows = *operands_.get<ffi::AnyBuffer>(operand);
      JB_RETURN_IF_ERROR(CheckType(kOp, name.c_str(), rows, type_));
      const auto shape = rows.dimensions();
      const bool fits = static_cast<int64_t>(shape.size()) == attributes_.num_batch_dims + 3 &&
                        (operand == 3 || shape.back() == problem.features);
      if (!fits) return WrongShape(kOp, name.c_str(), rows, "rows, heads, features");
    }
    return ffi::Error::Success();
  }

  ffi::Error DecodeAngles(const ffi::AnyBuffer& frequencies, const ffi::AnyBuffer& positions, Call* call) const {
    const rope::Problem& problem = call->problem;
    JB_RETURN_IF_ERROR(rope::DecodeFrequencies(batch_, frequencies, type_, problem.pairs, &call->frequencies));
    JB_RETURN_IF_ERROR(rope::DecodeSections(kOp, attributes_.sections, attributes_.sections_interleaved, problem.pairs,
                                            &call->positions.sections));
    call->positions.are_shared_by_examples = true;
    return rope::DecodePositions(kOp, batch_, positions, attributes_.sections.size() > 0, {problem.length},
                                 &call->positions);
  }

  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  const Attributes attributes_;
  Batch batch_{kOp};
  ffi::DataType type_ = ffi::DataType::INVALID;
};

ffi::Error HandleRopeWrite(Context context, ffi::RemainingArgs operands, ffi::RemainingRets results,
                           Attributes attributes) {
  Call call{};
  JB_RETURN_IF_ERROR(Decoder(operands, results, attributes).Decode(&call));
  return ToError(kOp, call.Run(context));
}

// The call that the parameters of a plan describe, with one head of values.
Call CallOf(const PlanParameters& parameters) {
  Call call{};
  call.type = TypeOfWidth(parameters.at("element_bytes"), /*is_floating=*/true);
  call.problem.features = parameters.at("features");
  call.problem.pairs = parameters.at("rotary_dim") / 2;
  call.problem.first_rotated = parameters.at("rotary_offset");
  call.problem.interleaved = parameters.at("interleaved") != 0;
  write_rows::Pool values;
  values.number = kValues;
  values.inner = parameters.at("value_features");
  call.write.pools.push_back(values);
  return call;
}

JB_TARGET(kOp, HandleRopeWrite, PlanOf<CallOf>, Call::Strategies());

}  // namespace
}  // namespace jax_baracuda::rope_write
