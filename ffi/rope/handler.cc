// The handlers of rope and its gradient.
#include "ffi/core/run.h"
#include "ffi/rope/decoding.h"

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
namespace {

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
    const auto result = batch_.View(y, /*may_be_shared=*/false);
    const int64_t heads = result && result->dims.size() == 4 ? result->dims[HeadsAxis()] : 1;
    Tensor& tensor = call_.tensors[call_.num_tensors++];
    tensor = {{}, y.untyped_data(), heads};
    BatchOperand of_y;
    JB_RETURN_IF_ERROR(TakeTensor(y_name, y, heads, /*may_be_shared=*/false, &of_y));
    return TakeTensor(x_name, x, heads, /*may_be_shared=*/true, &tensor.x);
  }

  ffi::Error SetFrequencies(const ffi::AnyBuffer& frequencies) {
    return DecodeFrequencies(batch_, frequencies, type_, call_.problem.pairs, &call_.frequencies);
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

  ffi::Error TakeTensor(const char* name, const ffi::AnyBuffer& buffer, int64_t heads, bool may_be_shared,
                        BatchOperand* operand) const {
    const Problem& problem = call_.problem;
    const int64_t second = attributes_.heads_first ? heads : problem.length;
    const int64_t third = attributes_.heads_first ? problem.length : heads;
    return batch_.Take(name, buffer, type_, {problem.examples, second, third, problem.features}, operand,
                       may_be_shared);
  }

  const char* op_;
  const Attributes attributes_;
  Call& call_;
  Batch batch_;
  ffi::DataType type_ = ffi::DataType::INVALID;
};

template <bool kIsBackward>
ffi::Error HandleRope(Context context, ffi::AnyBuffer x, ffi::AnyBuffer frequencies, ffi::RemainingArgs positions,
                      ffi::Result<ffi::AnyBuffer> y, Attributes attributes) {
  constexpr const char* kOp = kIsBackward ? "rope_backward" : "rope";
  Call call;
  Decoder decoder(kOp, attributes, kIsBackward, &call);
  JB_RETURN_IF_ERROR(decoder.AddTensor("x", x, "y", *y));
  JB_RETURN_IF_ERROR(decoder.SetFrequencies(frequencies));
  JB_RETURN_IF_ERROR(decoder.SetPositions(positions));
  return ToError(kOp, call.Run(context));
}

template <bool kIsBackward>
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
  return ToError(kOp, call.Run(context));
}

// The call that the parameters of a plan describe, with one tensor that has the heads of all.
Call CallOf(const PlanParameters& parameters) {
  Call call{};
  call.problem = Problem{parameters.at("batch"),
                         parameters.at("examples"),
                         parameters.at("length"),
                         parameters.at("features"),
                         parameters.at("rotary_dim") / 2,
                         parameters.at("rotary_offset"),
                         parameters.at("heads_first") != 0,
                         parameters.at("interleaved") != 0};
  call.type = TypeOfWidth(parameters.at("element_bytes"), /*is_floating=*/true);
  call.num_tensors = 1;
  call.tensors[0].heads = parameters.at("heads");
  return call;
}

JB_TARGET("rope", HandleRope</*kIsBackward=*/false>, PlanOf<CallOf>, Call::Strategies());
JB_TARGET("rope_backward", HandleRope</*kIsBackward=*/true>, PlanOf<CallOf>, Call::Strategies());
JB_TARGET("rope_qk", HandleRopeQk</*kIsBackward=*/false>, PlanOf<CallOf>, Call::Strategies());
JB_TARGET("rope_qk_backward", HandleRopeQk</*kIsBackward=*/true>, PlanOf<CallOf>, Call::Strategies());

}  // namespace
}  // namespace jax_baracuda::rope
