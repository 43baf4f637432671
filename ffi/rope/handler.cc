// The handlers of rope and its gradient.
#include "ffi/core/run.h"
#include "ffi/rope/decoding.h"

namespace jax_baracuda::rope {
namespace {

// Checks the buffers of a call. Add tensors first.
class Decoder {
 public:
  Decoder(Arguments& arguments, bool is_backward, Call* call) : arguments_(arguments), call_(*call) {
    call_ = Call{};
    call_.problem.heads_first = arguments.Flag("heads_first");
    const double scale = arguments.Float("scale");
    call_.cos_scale = scale;
    call_.sin_scale = is_backward ? -scale : scale;
  }

  // The result of the first tensor sets the element type and all dimensions; other tensors may differ in their heads.
  void AddTensor(const Buffer& x, const Buffer& y) {
    if (call_.num_tensors == 0) SetProblem(y);
    const auto result = batch_.View(y, /*may_be_shared=*/false);
    const int64_t heads = result && result->dims.size() == 4 ? result->dims[HeadsAxis()] : 1;
    TakeTensor(y, heads, /*may_be_shared=*/false);
    call_.tensors[call_.num_tensors++] = {TakeTensor(x, heads, /*may_be_shared=*/true), y.data, heads};
  }

  void SetFrequencies(const Buffer& frequencies) {
    call_.frequencies = DecodeFrequencies(batch_, frequencies, type_, call_.problem.pairs);
  }

  // The one optional operand.
  void SetPositions() {
    const Problem& problem = call_.problem;
    const IntegerSpan sections = arguments_.Integers("sections");
    call_.positions.sections = DecodeSections(sections, arguments_.Flag("sections_interleaved"), problem.pairs);
    if (!arguments_.Flag("has_positions")) return;
    const Buffer positions = arguments_.Operand("positions");
    const IntegerSpan dims = positions.dims;
    call_.positions.are_shared_by_examples = dims.size() > 1 && dims[dims.size() - 2] != problem.examples;
    DecodePositions(batch_, positions, sections.size() > 0,
                    {Dimension(problem.examples, /*or_one=*/true), problem.length}, &call_.positions);
  }

 private:
  size_t HeadsAxis() const { return call_.problem.heads_first ? 1 : 2; }

  void SetProblem(const Buffer& y) {
    Problem& problem = call_.problem;
    const char* const trailing =
        problem.heads_first ? "examples, heads, length, features" : "examples, length, heads, features";
    batch_ = Batch(y, arguments_.Integer("num_batch_dims"), trailing);
    const IntegerSpan dims = batch_.View(y, /*may_be_shared=*/false)->dims;
    if (dims.size() != 4) throw batch_.WrongRank(y, trailing);
    type_ = y.type;
    call_.type = ElementTypeOf(type_);
    y.CheckKernel(IsFloating(call_.type));
    problem.batch = batch_.size();
    problem.examples = dims[0];
    problem.length = dims[3 - HeadsAxis()];
    problem.features = dims[3];
    DecodeRotated(arguments_, &problem);
  }

  BatchOperand TakeTensor(const Buffer& buffer, int64_t heads, bool may_be_shared) const {
    const Problem& problem = call_.problem;
    const int64_t second = problem.heads_first ? heads : problem.length;
    const int64_t third = problem.heads_first ? problem.length : heads;
    return batch_.Take(buffer, type_, {problem.examples, second, third, problem.features}, may_be_shared);
  }

  Arguments& arguments_;
  Call& call_;
  Batch batch_;
  DataType type_ = XLA_FFI_DataType_INVALID;
};

template <bool kIsBackward>
void HandleRope(Arguments& arguments) {
  const Buffer x = arguments.Operand("x"), frequencies = arguments.Operand("frequencies");
  Call call;
  Decoder decoder(arguments, kIsBackward, &call);
  decoder.AddTensor(x, arguments.Result("y"));
  decoder.SetFrequencies(frequencies);
  decoder.SetPositions();
  Run(arguments, call);
}

template <bool kIsBackward>
void HandleRopeQk(Arguments& arguments) {
  const Buffer q = arguments.Operand("q"), k = arguments.Operand("k"), frequencies = arguments.Operand("frequencies");
  Call call;
  Decoder decoder(arguments, kIsBackward, &call);
  decoder.AddTensor(q, arguments.Result("q_out"));
  decoder.AddTensor(k, arguments.Result("k_out"));
  decoder.SetFrequencies(frequencies);
  decoder.SetPositions();
  Run(arguments, call);
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
