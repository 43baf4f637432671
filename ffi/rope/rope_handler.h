// Checks the buffers of the rope ops and converts them to calls, for both back ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ffi/core/batch.h"
#include "ffi/core/handler.h"
#include "ffi/core/operands.h"
#include "ffi/core/target_table.h"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

struct Attributes {
  bool heads_first, interleaved;
  int64_t rotary_dim, rotary_offset;
  ffi::Span<const int64_t> sections;  // the numbers of pairs; empty: one position per token
  bool sections_interleaved;
  double scale;
  bool has_positions;
  int64_t num_batch_dims;
};

}  // namespace jax_baracuda::rope

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::rope::Attributes, StructMember<bool>("heads_first"),
                                      StructMember<bool>("interleaved"), StructMember<int64_t>("rotary_dim"),
                                      StructMember<int64_t>("rotary_offset"),
                                      StructMember<ffi::Span<const int64_t>>("sections"),
                                      StructMember<bool>("sections_interleaved"), StructMember<double>("scale"),
                                      StructMember<bool>("has_positions"), StructMember<int64_t>("num_batch_dims"));

namespace jax_baracuda::rope {

// The problem described by the parameters of a plan. Their `heads` are those of all tensors together.
inline Problem ProblemOf(const PlanParameters& parameters) {
  return Problem{parameters.at("batch"),
                 parameters.at("examples"),
                 parameters.at("length"),
                 parameters.at("features"),
                 parameters.at("rotary_dim") / 2,
                 parameters.at("rotary_offset"),
                 parameters.at("heads_first") != 0,
                 parameters.at("interleaved") != 0};
}

// Sets the rotated features of a problem whose `features` are known. `attributes` has those of rope.
template <typename OpAttributes>
ffi::Error DecodeRotated(const char* op, const OpAttributes& attributes, Problem* problem) {
  const int64_t rotary_dim = attributes.rotary_dim, rotary_offset = attributes.rotary_offset;
  const int64_t features = problem->features;
  if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > features) {
    return InvalidArgument(op, "rotary_dim is " + std::to_string(rotary_dim) +
                                   ", expected an even number from 2 to the number of features, which is " +
                                   std::to_string(features));
  }
  if (rotary_offset < 0 || rotary_offset > features - rotary_dim) {
    return InvalidArgument(op, "rotary_offset is " + std::to_string(rotary_offset) + ", expected a number from 0 to " +
                                   std::to_string(features - rotary_dim));
  }
  problem->pairs = rotary_dim / 2;
  problem->first_rotated = rotary_offset;
  problem->interleaved = attributes.interleaved;
  return ffi::Error::Success();
}

// The sections of `pairs` pairs. `sizes`: of each section; empty: one section with all pairs.
inline ffi::Error DecodeSections(const char* op, ffi::Span<const int64_t> sizes, bool are_interleaved, int64_t pairs,
                                 Sections* sections) {
  *sections = Sections{1, are_interleaved, {}};
  if (sizes.size() == 0) return ffi::Error::Success();
  const auto wrong = [&] {
    return InvalidArgument(op, "sections expected: at most " + std::to_string(kMaxSections) +
                                   " numbers of at least 0 that sum to " + std::to_string(pairs));
  };
  if (sizes.size() > kMaxSections) return wrong();
  const int64_t count = static_cast<int64_t>(sizes.size());
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = sizes.begin()[i];
    if (size < 0 || size > pairs - end) return wrong();
    end += size;
    const int64_t last = are_interleaved ? count * size : end;
    sections->ends[i] = static_cast<int32_t>(std::min<int64_t>(last, std::numeric_limits<int32_t>::max()));
  }
  if (end != pairs) return wrong();
  sections->count = static_cast<int32_t>(count);
  return ffi::Error::Success();
}

// `type`: of the tensors.
inline ffi::Error DecodeFrequencies(const char* op, const Batch& batch, const ffi::AnyBuffer& buffer,
                                    ffi::DataType type, int64_t pairs, Frequencies* frequencies) {
  JB_RETURN_IF_ERROR(CheckType(op, "frequencies", buffer, ComputeDataType(type)));
  BatchedBuffer view;
  JB_RETURN_IF_ERROR(batch.Check("frequencies", buffer, /*may_be_shared=*/true, {2, pairs}, &view));
  *frequencies = {view.data, view.is_shared};
  return ffi::Error::Success();
}

// [sections, places...], or [places...] without the attribute `sections`. Sets all but are_shared_by_examples.
inline ffi::Error DecodePositions(const char* op, const Batch& batch, const ffi::AnyBuffer& buffer, bool has_sections,
                                  std::vector<Dimension> places, Positions* positions) {
  const ffi::DataType type = buffer.element_type();
  JB_RETURN_IF_ERROR(CheckType(
      op, "positions", buffer, [] { return "S32 or S64"; }, type == ffi::DataType::S32 || type == ffi::DataType::S64));
  if (has_sections) places.insert(places.begin(), positions->sections.count);
  BatchedBuffer view;
  JB_RETURN_IF_ERROR(batch.Check("positions", buffer, /*may_be_shared=*/true, places, &view));
  positions->data = view.data;
  positions->are_64_bit = type == ffi::DataType::S64;
  positions->are_shared_by_batch = view.is_shared;
  return ffi::Error::Success();
}

// Checks the buffers of a call. Add tensors first.
class Decoder {
 public:
  Decoder(const char* op, const Attributes& attributes, bool is_backward, Call* call)
      : op_(op), attributes_(attributes), call_(*call), batch_(op) {
    call_ = Call{};
    call_.problem.heads_first = attributes.heads_first;
    call_.cos_scale = attributes.scale;
    call_.sin_scale = is_backward ? -attributes.scale : attributes.scale;
  }

  // The result of the first tensor sets the element type and all dimensions; other tensors may differ in their heads.
  ffi::Error AddTensor(const char* x_name, const ffi::AnyBuffer& x, const char* y_name, const ffi::AnyBuffer& y) {
    if (call_.num_tensors == 0) JB_RETURN_IF_ERROR(SetProblem(y_name, y));
    JB_RETURN_IF_ERROR(CheckType(op_, y_name, y, type_));
    const auto result = batch_.View(y, /*may_be_shared=*/false);
    const int64_t heads = result && result->dims.size() == 4 ? result->dims[HeadsAxis()] : 1;
    BatchedBuffer y_view, x_view;
    JB_RETURN_IF_ERROR(CheckTensor(y_name, y, heads, /*may_be_shared=*/false, &y_view));
    JB_RETURN_IF_ERROR(CheckType(op_, x_name, x, type_));
    JB_RETURN_IF_ERROR(CheckTensor(x_name, x, heads, /*may_be_shared=*/true, &x_view));
    call_.tensors[call_.num_tensors++] = {x_view.data, x_view.is_shared, y_view.data, heads};
    return ffi::Error::Success();
  }

  ffi::Error SetFrequencies(const ffi::AnyBuffer& frequencies) {
    return DecodeFrequencies(op_, batch_, frequencies, type_, call_.problem.pairs, &call_.frequencies);
  }

  // The one optional operand.
  ffi::Error SetPositions(ffi::RemainingArgs operands) {
    const Problem& problem = call_.problem;
    JB_RETURN_IF_ERROR(DecodeSections(op_, attributes_.sections, attributes_.sections_interleaved, problem.pairs,
                                      &call_.positions.sections));
    OptionalOperands optional(op_, operands);
    JB_RETURN_IF_ERROR(optional.Next("positions", attributes_.has_positions, [&](const ffi::AnyBuffer& positions) {
      const auto shape = positions.dimensions();
      call_.positions.are_shared_by_examples = shape.size() > 1 && shape[shape.size() - 2] != problem.examples;
      return DecodePositions(op_, batch_, positions, attributes_.sections.size() > 0,
                             {Dimension(problem.examples, /*or_one=*/true), problem.length}, &call_.positions);
    }));
    return optional.End();
  }

 private:
  size_t HeadsAxis() const { return attributes_.heads_first ? 1 : 2; }

  ffi::Error SetProblem(const char* y_name, const ffi::AnyBuffer& y) {
    const char* const trailing =
        attributes_.heads_first ? "examples, heads, length, features" : "examples, length, heads, features";
    JB_RETURN_IF_ERROR(batch_.Decode(y_name, y, attributes_.num_batch_dims, trailing));
    const BatchedBuffer view = *batch_.View(y, /*may_be_shared=*/false);
    if (view.dims.size() != 4) return batch_.WrongRank(y_name, y, trailing);
    type_ = view.type;
    call_.type = ElementTypeOf(type_);
    if (!IsFloating(call_.type)) return UnsupportedType(op_, y_name, type_);
    Problem& problem = call_.problem;
    problem.batch = batch_.size();
    problem.examples = view.dims[0];
    problem.length = view.dims[3 - HeadsAxis()];
    problem.features = view.dims[3];
    return DecodeRotated(op_, attributes_, &problem);
  }

  ffi::Error CheckTensor(const char* name, const ffi::AnyBuffer& buffer, int64_t heads, bool may_be_shared,
                         BatchedBuffer* view) const {
    const Problem& problem = call_.problem;
    const int64_t second = attributes_.heads_first ? heads : problem.length;
    const int64_t third = attributes_.heads_first ? problem.length : heads;
    return batch_.Check(name, buffer, may_be_shared, {problem.examples, second, third, problem.features}, view);
  }

  const char* op_;
  const Attributes attributes_;
  Call& call_;
  Batch batch_;
  ffi::DataType type_ = ffi::DataType::INVALID;
};

// The handlers. The back ends differ in the context and in the function that runs a decoded call.

template <typename Context, ffi::Error (*kRun)(Context, const char* op, const Call&), bool kIsBackward>
ffi::Error HandleRope(Context context, ffi::AnyBuffer x, ffi::AnyBuffer frequencies, ffi::RemainingArgs positions,
                      ffi::Result<ffi::AnyBuffer> y, Attributes attributes) {
  constexpr const char* kOp = kIsBackward ? "rope_backward" : "rope";
  Call call;
  Decoder decoder(kOp, attributes, kIsBackward, &call);
  JB_RETURN_IF_ERROR(decoder.AddTensor("x", x, "y", *y));
  JB_RETURN_IF_ERROR(decoder.SetFrequencies(frequencies));
  JB_RETURN_IF_ERROR(decoder.SetPositions(positions));
  return kRun(context, kOp, call);
}

template <typename Context, ffi::Error (*kRun)(Context, const char* op, const Call&), bool kIsBackward>
ffi::Error HandleRopeQk(Context context, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer frequencies,
                        ffi::RemainingArgs positions, ffi::Result<ffi::AnyBuffer> q_out,
                        ffi::Result<ffi::AnyBuffer> k_out, Attributes attributes) {
  constexpr const char* kOp = kIsBackward ? "rope_qk_backward" : "rope_qk";
  Call call;
  Decoder decoder(kOp, attributes, kIsBackward, &call);
  JB_RETURN_IF_ERROR(decoder.AddTensor("q", q, "q_out", *q_out));
  JB_RETURN_IF_ERROR(decoder.AddTensor("k", k, "k_out", *k_out));
  JB_RETURN_IF_ERROR(decoder.SetFrequencies(frequencies));
  JB_RETURN_IF_ERROR(decoder.SetPositions(positions));
  return kRun(context, kOp, call);
}

}  // namespace jax_baracuda::rope
