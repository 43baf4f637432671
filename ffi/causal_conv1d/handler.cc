// The handlers of the causal_conv1d ops.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/core/arguments.h"
#include "ffi/core/batch.h"
#include "ffi/core/integers.h"
#include "ffi/core/run.h"
#include "ffi/core/target_table.h"

namespace jax_baracuda::causal_conv1d {
namespace {

constexpr char kPresent = 0;  // the data of optional operands in calls without data

// The call that the parameters of a plan describe, without data.
template <typename Call>
Call CallOf(const PlanParameters& parameters) {
  Call call{};
  call.problem = Problem{parameters.at("batch"),
                         parameters.at("examples"),
                         parameters.at("channels"),
                         parameters.at("length"),
                         static_cast<int>(parameters.at("width")),
                         parameters.at("channels_last") != 0,
                         parameters.at("silu") != 0,
                         parameters.at("has_same_sequence") != 0};
  call.type = TypeOfWidth(parameters.at("element_bytes"), /*is_floating=*/true);
  call.x.is_shared = parameters.at("x_is_shared") != 0;
  if constexpr (std::is_same_v<Call, BackwardCall>) call.d_output.is_shared = parameters.at("d_output_is_shared") != 0;
  if constexpr (std::is_same_v<Call, UpdateCall>) call.state_length = parameters.at("state_length");
  if constexpr (std::is_same_v<Call, PoolUpdateCall>) {
    call.pool.length = parameters.at("state_length");
    call.pool.sequences = call.problem.examples;
    if (parameters.at("has_num_accepted") != 0) call.num_accepted.data = &kPresent;
  }
  return call;
}

// Checks the buffers of a call. Call Begin first: it sets the sizes that the other buffers must match.
class Decoder {
 public:
  Decoder(Arguments& arguments, ConvolutionCall* call) : arguments_(arguments), call_(*call), problem_(call->problem) {}

  // The result of x's shape sets the element type and all dimensions except the width, which the weight sets.
  void Begin(bool channels_last, const Buffer& result, const Buffer& weight, const Buffer& x) {
    problem_ = Problem{};
    problem_.channels_last = channels_last;
    problem_.silu = arguments_.Flag("silu");
    const char* const trailing = channels_last ? "examples, length, channels" : "examples, channels, length";
    batch_ = Batch(result, arguments_.Integer("num_batch_dims"), trailing);
    const IntegerSpan dims = batch_.View(result, /*may_be_shared=*/false)->dims;
    if (dims.size() != 3) throw batch_.WrongRank(result, trailing);
    problem_.batch = batch_.size();
    problem_.examples = dims[0];
    problem_.channels = dims[channels_last ? 2 : 1];
    problem_.length = dims[channels_last ? 1 : 2];
    type_ = result.type;
    call_.type = ElementTypeOf(type_);
    result.CheckKernel(IsFloating(call_.type));
    const auto filter = batch_.View(weight, /*may_be_shared=*/true);
    const int64_t width = filter && filter->dims.size() == 2 ? filter->dims[1] : 0;
    if (width < 1 || width > kMaxWidth) {
      throw batch_.WrongShape(weight, /*may_be_shared=*/true, "channels,width of 1 to " + std::to_string(kMaxWidth));
    }
    problem_.width = static_cast<int>(width);
    TakeParameter(weight, {problem_.channels, width}, &call_.weight);
    call_.x = Sequences(x);
  }

  // An operand of x's shape.
  BatchOperand Sequences(const Buffer& buffer) const {
    const int64_t second = problem_.channels_last ? problem_.length : problem_.channels;
    const int64_t third = problem_.channels_last ? problem_.channels : problem_.length;
    return batch_.Take(buffer, type_, {problem_.examples, second, third});
  }

  // An initial state, or the cotangent of a final one.
  BatchOperand State(const Buffer& buffer) const {
    if (problem_.width == 1) throw buffer.Wrong("is empty where the width is 1");
    return batch_.Take(buffer, type_, {problem_.examples, problem_.channels, problem_.width - 1});
  }

  // The old state of causal_conv1d_update; its last dimension is the number of inputs that it holds.
  void LongState(const Buffer& buffer) {
    const auto view = batch_.View(buffer, /*may_be_shared=*/true);
    call_.state_length = view && view->dims.size() == 3 ? view->dims[2] : -1;
    if (call_.state_length < problem_.width - 1) {
      throw batch_.WrongShape(buffer, /*may_be_shared=*/true,
                              "examples,channels,at least " + std::to_string(problem_.width - 1) + " inputs");
    }
    call_.initial_state = batch_.Take(buffer, type_, {problem_.examples, problem_.channels, call_.state_length});
  }

  // The pool of an op and the slots of its sequences, [sequences], or one for each example if `is_of_examples`.
  void Pool(const Buffer& states, const Buffer& slots, const Buffer& new_states, bool is_of_examples,
            int64_t min_length, StatePool* pool) const {
    const auto view = batch_.View(states, /*may_be_shared=*/false);
    pool->slots = view && view->dims.size() == 3 ? view->dims[0] : 0;
    pool->length = view && view->dims.size() == 3 ? view->dims[2] : -1;
    if (pool->length < min_length) {
      throw batch_.WrongShape(states, /*may_be_shared=*/false,
                              "slots,channels,at least " + std::to_string(min_length) + " inputs");
    }
    const std::initializer_list<Dimension> trailing = {pool->slots, problem_.channels, pool->length};
    const void* const old = batch_.TakeResult(states, type_, trailing);
    pool->data = batch_.TakeResult(new_states, type_, trailing);
    const int64_t bytes = MultiplySizes(states.Size(), ElementBytes(call_.type));
    pool->of_old_states = Copy(pool->data, old, bytes);
    const auto of_slots = batch_.View(slots, /*may_be_shared=*/true);
    pool->sequences = is_of_examples                           ? problem_.examples
                      : of_slots && of_slots->dims.size() == 1 ? of_slots->dims[0]
                                                               : -1;
    if (pool->sequences < 0) throw batch_.WrongShape(slots, /*may_be_shared=*/true, "sequences");
    pool->slots_of_sequences = batch_.Take(slots, XLA_FFI_DataType_S32, {pool->sequences});
  }

  // The optional operand of all ops.
  void Bias() const {
    if (arguments_.Flag("has_bias")) TakeParameter(arguments_.Operand("bias"), {problem_.channels}, &call_.bias);
  }

  // The other optional operands that an op and its gradient have in common.
  void InitialStateAndSameSequence() const {
    if (arguments_.Flag("has_initial_state")) {
      call_.state_length = problem_.width - 1;
      call_.initial_state = State(arguments_.Operand("initial_state"));
    }
    problem_.has_same_sequence = arguments_.Flag("has_same_sequence");
    if (problem_.has_same_sequence) {
      call_.same_sequence =
          batch_.Take(arguments_.Operand("same_sequence"), XLA_FFI_DataType_U8, {problem_.examples, problem_.length});
    }
  }

  const Batch& batch() const { return batch_; }
  DataType type() const { return type_; }
  DataType compute_type() const { return ComputeDataType(type_); }

 private:
  void TakeParameter(const Buffer& buffer, std::initializer_list<Dimension> trailing, Parameter* parameter) const {
    const bool may_be_float32 = compute_type() == XLA_FFI_DataType_F32 && type_ != XLA_FFI_DataType_F32;
    if (buffer.type != type_ && !(may_be_float32 && buffer.type == XLA_FFI_DataType_F32)) {
      throw buffer.WrongType(TypeName(type_) + (may_be_float32 ? " or F32" : ""));
    }
    parameter->type = ElementTypeOf(buffer.type);
    static_cast<BatchOperand&>(*parameter) = batch_.Take(buffer, buffer.type, trailing);
  }

  Arguments& arguments_;
  Batch batch_;
  ConvolutionCall& call_;
  Problem& problem_;
  DataType type_ = XLA_FFI_DataType_INVALID;
};

void HandleForward(Arguments& arguments) {
  const Buffer x = arguments.Operand("x"), weight = arguments.Operand("weight"), y = arguments.Result("y");
  ForwardCall call;
  Decoder decoder(arguments, &call);
  decoder.Begin(arguments.Flag("channels_last"), y, weight, x);
  decoder.Bias();
  decoder.InitialStateAndSameSequence();
  call.y = y.data;
  Run(arguments, call);
}

void HandleBackward(Arguments& arguments) {
  const Buffer x = arguments.Operand("x"), weight = arguments.Operand("weight");
  const Buffer d_output = arguments.Operand("d_output"), dx = arguments.Result("dx");
  const Buffer dweight = arguments.Result("dweight"), dbias = arguments.Result("dbias");
  BackwardCall call;
  const Problem& problem = call.problem;
  Decoder decoder(arguments, &call);
  const Batch& batch = decoder.batch();
  decoder.Begin(arguments.Flag("channels_last"), dx, weight, x);
  call.d_output = decoder.Sequences(d_output);
  decoder.Bias();
  decoder.InitialStateAndSameSequence();
  if (arguments.Flag("has_d_final_state")) call.d_final_state = decoder.State(arguments.Operand("d_final_state"));
  call.dx = dx.data;
  call.dweight = batch.TakeResult(dweight, decoder.compute_type(), {problem.channels, problem.width});
  call.dbias = batch.TakeResult(dbias, decoder.compute_type(), {problem.channels});
  if (arguments.Flag("has_initial_state")) {
    call.d_initial_state = batch.TakeResult(arguments.Result("d_initial_state"), decoder.type(),
                                            {problem.examples, problem.channels, problem.width - 1});
  }
  RunWithScratch(arguments, &call);
}

void HandleUpdate(Arguments& arguments) {
  const Buffer x = arguments.Operand("x"), state = arguments.Operand("state"), weight = arguments.Operand("weight");
  const Buffer y = arguments.Result("y"), new_state = arguments.Result("new_state");
  UpdateCall call;
  const Problem& problem = call.problem;
  Decoder decoder(arguments, &call);
  decoder.Begin(arguments.Flag("channels_last"), y, weight, x);
  decoder.LongState(state);
  decoder.Bias();
  call.new_state =
      decoder.batch().TakeResult(new_state, decoder.type(), {problem.examples, problem.channels, call.state_length});
  call.y = y.data;
  Run(arguments, call);
}

void HandleRagged(Arguments& arguments) {
  const Buffer x = arguments.Operand("x"), states = arguments.Operand("states"), weight = arguments.Operand("weight");
  const Buffer starts = arguments.Operand("starts"), slots = arguments.Operand("slots");
  const Buffer has_state = arguments.Operand("has_state");
  const Buffer y = arguments.Result("y"), new_states = arguments.Result("new_states");
  RaggedCall call;
  const Problem& problem = call.problem;
  StatePool& pool = call.pool;
  Decoder decoder(arguments, &call);
  decoder.Begin(/*channels_last=*/true, y, weight, x);
  if (problem.examples != 1 || problem.length > std::numeric_limits<int32_t>::max()) {
    throw x.Wrong("has " + std::to_string(problem.examples) + " examples of " + std::to_string(problem.length) +
                  " times, expected 1 of less than 2^31");
  }
  decoder.Pool(states, slots, new_states, /*is_of_examples=*/false, problem.width - 1, &pool);
  if (pool.sequences >= std::numeric_limits<int32_t>::max()) {
    throw slots.Wrong("has " + std::to_string(pool.sequences) + " sequences, expected less");
  }
  call.starts = decoder.batch().Take(starts, XLA_FFI_DataType_S32, {pool.sequences + 1});
  call.has_state = decoder.batch().Take(has_state, XLA_FFI_DataType_PRED, {pool.sequences});
  decoder.Bias();
  call.y = y.data;
  Run(arguments, call);
}

void HandlePoolUpdate(Arguments& arguments) {
  const Buffer x = arguments.Operand("x"), states = arguments.Operand("states"), weight = arguments.Operand("weight");
  const Buffer slots = arguments.Operand("slots");
  const Buffer y = arguments.Result("y"), new_states = arguments.Result("new_states");
  PoolUpdateCall call;
  const Problem& problem = call.problem;
  Decoder decoder(arguments, &call);
  decoder.Begin(arguments.Flag("channels_last"), y, weight, x);
  decoder.Bias();
  if (arguments.Flag("has_num_accepted")) {
    const Buffer num_accepted = arguments.Operand("num_accepted");
    call.num_accepted = decoder.batch().Take(num_accepted, XLA_FFI_DataType_S32, {problem.examples});
  }
  const int64_t min_length = std::max<int64_t>(problem.width - 1, call.num_written());
  decoder.Pool(states, slots, new_states, /*is_of_examples=*/true, min_length, &call.pool);
  call.y = y.data;
  Run(arguments, call);
}

JB_TARGET("causal_conv1d", HandleForward, PlanOf<CallOf<ForwardCall>>, ForwardCall::Strategies());
JB_TARGET("causal_conv1d_backward", HandleBackward, PlanOf<CallOf<BackwardCall>>, BackwardCall::Strategies());
JB_TARGET("causal_conv1d_update", HandleUpdate, PlanOf<CallOf<UpdateCall>>, UpdateCall::Strategies());
JB_TARGET("causal_conv1d_ragged", HandleRagged, PlanOf<CallOf<RaggedCall>>, RaggedCall::Strategies());
JB_TARGET("causal_conv1d_update_pool", HandlePoolUpdate, PlanOf<CallOf<PoolUpdateCall>>, PoolUpdateCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::causal_conv1d
