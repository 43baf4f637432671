// The handlers of the causal_conv1d ops.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/core/batch.h"
#include "ffi/core/integers.h"
#include "ffi/core/operands.h"
#include "ffi/core/run.h"
#include "ffi/core/target_table.h"

namespace jax_baracuda::causal_conv1d {

// The attributes of the ops.
struct ForwardOptions {
  int64_t num_batch_dims;
  bool channels_last, silu, has_bias, has_initial_state, has_same_sequence;
};

struct BackwardOptions {
  int64_t num_batch_dims;
  bool channels_last, silu, has_bias, has_initial_state, has_same_sequence, has_d_final_state;
};

struct UpdateOptions {
  int64_t num_batch_dims;
  bool channels_last, silu, has_bias;
  static constexpr bool has_initial_state = false, has_same_sequence = false;
};

struct RaggedOptions {
  int64_t num_batch_dims;
  bool silu, has_bias;
  static constexpr bool channels_last = true, has_initial_state = false, has_same_sequence = false;
};

struct PoolUpdateOptions {
  int64_t num_batch_dims;
  bool channels_last, silu, has_bias, has_num_accepted;
  static constexpr bool has_initial_state = false, has_same_sequence = false;
};

}  // namespace jax_baracuda::causal_conv1d

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::causal_conv1d::ForwardOptions,
                                      StructMember<int64_t>("num_batch_dims"), StructMember<bool>("channels_last"),
                                      StructMember<bool>("silu"), StructMember<bool>("has_bias"),
                                      StructMember<bool>("has_initial_state"), StructMember<bool>("has_same_sequence"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::causal_conv1d::BackwardOptions,
                                      StructMember<int64_t>("num_batch_dims"), StructMember<bool>("channels_last"),
                                      StructMember<bool>("silu"), StructMember<bool>("has_bias"),
                                      StructMember<bool>("has_initial_state"), StructMember<bool>("has_same_sequence"),
                                      StructMember<bool>("has_d_final_state"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::causal_conv1d::UpdateOptions,
                                      StructMember<int64_t>("num_batch_dims"), StructMember<bool>("channels_last"),
                                      StructMember<bool>("silu"), StructMember<bool>("has_bias"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::causal_conv1d::RaggedOptions,
                                      StructMember<int64_t>("num_batch_dims"), StructMember<bool>("silu"),
                                      StructMember<bool>("has_bias"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::causal_conv1d::PoolUpdateOptions,
                                      StructMember<int64_t>("num_batch_dims"), StructMember<bool>("channels_last"),
                                      StructMember<bool>("silu"), StructMember<bool>("has_bias"),
                                      StructMember<bool>("has_num_accepted"));

namespace jax_baracuda::causal_conv1d {
namespace {

constexpr const char* kForwardName = "causal_conv1d";
constexpr const char* kBackwardName = "causal_conv1d_backward";
constexpr const char* kUpdateName = "causal_conv1d_update";
constexpr const char* kRaggedName = "causal_conv1d_ragged";
constexpr const char* kPoolUpdateName = "causal_conv1d_update_pool";

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
  Decoder(const char* op, ConvolutionCall* call) : op_(op), batch_(op), call_(*call), problem_(call->problem) {}

  // The result of x's shape sets the element type and all dimensions except the width, which the weight sets.
  template <typename Options>
  ffi::Error Begin(const Options& options, const char* result_name, const ffi::AnyBuffer& result,
                   const ffi::AnyBuffer& weight, const ffi::AnyBuffer& x) {
    problem_ = Problem{};
    problem_.channels_last = options.channels_last;
    problem_.silu = options.silu;
    problem_.has_same_sequence = options.has_same_sequence;
    const char* const trailing = options.channels_last ? "examples, length, channels" : "examples, channels, length";
    JB_RETURN_IF_ERROR(batch_.Decode(result_name, result, options.num_batch_dims, trailing));
    const BatchedBuffer view = *batch_.View(result, /*may_be_shared=*/false);
    if (view.dims.size() != 3) return batch_.WrongRank(result_name, result, trailing);
    problem_.batch = batch_.size();
    problem_.examples = view.dims[0];
    problem_.channels = view.dims[options.channels_last ? 2 : 1];
    problem_.length = view.dims[options.channels_last ? 1 : 2];
    type_ = view.type;
    call_.type = ElementTypeOf(type_);
    if (!IsFloating(call_.type)) return UnsupportedType(op_, result_name, type_);
    const auto filter = batch_.View(weight, /*may_be_shared=*/true);
    const int64_t width = filter && filter->dims.size() == 2 ? filter->dims[1] : 0;
    if (width < 1 || width > kMaxWidth) {
      return batch_.WrongShape("weight", weight, /*may_be_shared=*/true,
                               "channels,width of 1 to " + std::to_string(kMaxWidth));
    }
    problem_.width = static_cast<int>(width);
    JB_RETURN_IF_ERROR(TakeParameter("weight", weight, {problem_.channels, width}, &call_.weight));
    return Sequences("x", x, &call_.x);
  }

  // An operand of x's shape.
  ffi::Error Sequences(const char* name, const ffi::AnyBuffer& buffer, BatchOperand* operand) const {
    const int64_t second = problem_.channels_last ? problem_.length : problem_.channels;
    const int64_t third = problem_.channels_last ? problem_.channels : problem_.length;
    return batch_.Take(name, buffer, type_, {problem_.examples, second, third}, operand);
  }

  // An initial state, or the cotangent of a final one.
  ffi::Error State(const char* name, const ffi::AnyBuffer& buffer, BatchOperand* operand) const {
    if (problem_.width == 1) return InvalidArgument(op_, std::string(name) + " is empty where the width is 1");
    return batch_.Take(name, buffer, type_, {problem_.examples, problem_.channels, problem_.width - 1}, operand);
  }

  // The old state of causal_conv1d_update; its last dimension is the number of inputs that it holds.
  ffi::Error LongState(const ffi::AnyBuffer& buffer) {
    const auto view = batch_.View(buffer, /*may_be_shared=*/true);
    call_.state_length = view && view->dims.size() == 3 ? view->dims[2] : -1;
    if (call_.state_length < problem_.width - 1) {
      return batch_.WrongShape("state", buffer, /*may_be_shared=*/true,
                               "examples,channels,at least " + std::to_string(problem_.width - 1) + " inputs");
    }
    return batch_.Take("state", buffer, type_, {problem_.examples, problem_.channels, call_.state_length},
                       &call_.initial_state);
  }

  // The pool of an op and the slots of its sequences, [sequences], or one for each example if `is_of_examples`.
  ffi::Error Pool(const ffi::AnyBuffer& states, const ffi::AnyBuffer& slots, const ffi::AnyBuffer& new_states,
                  bool is_of_examples, int64_t min_length, StatePool* pool) const {
    const auto view = batch_.View(states, /*may_be_shared=*/false);
    pool->slots = view && view->dims.size() == 3 ? view->dims[0] : 0;
    pool->length = view && view->dims.size() == 3 ? view->dims[2] : -1;
    if (pool->length < min_length) {
      return batch_.WrongShape("states", states, /*may_be_shared=*/false,
                               "slots,channels,at least " + std::to_string(min_length) + " inputs");
    }
    const std::initializer_list<Dimension> trailing = {pool->slots, problem_.channels, pool->length};
    BatchOperand old;
    JB_RETURN_IF_ERROR(batch_.Take("states", states, type_, trailing, &old, /*may_be_shared=*/false));
    JB_RETURN_IF_ERROR(Result("new_states", new_states, type_, trailing, &pool->data));
    const int64_t bytes = MultiplySizes(TrailingSize(states, 0), ElementBytes(call_.type));
    pool->of_old_states = Copy(pool->data, old.data, bytes);
    const auto of_slots = batch_.View(slots, /*may_be_shared=*/true);
    pool->sequences = is_of_examples                           ? problem_.examples
                      : of_slots && of_slots->dims.size() == 1 ? of_slots->dims[0]
                                                               : -1;
    if (pool->sequences < 0) return batch_.WrongShape("slots", slots, /*may_be_shared=*/true, "sequences");
    return OfSequences("slots", slots, ffi::DataType::S32, pool->sequences, &pool->slots_of_sequences);
  }

  // One number for each sequence.
  ffi::Error OfSequences(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t sequences,
                         BatchOperand* operand) const {
    return batch_.Take(name, buffer, type, {sequences}, operand);
  }

  // The optional operands that the ops have in common.
  template <typename Options>
  ffi::Error Optional(const Options& options, OptionalOperands* optional) const {
    JB_RETURN_IF_ERROR(optional->Next("bias", options.has_bias, [&](const ffi::AnyBuffer& buffer) {
      return TakeParameter("bias", buffer, {problem_.channels}, &call_.bias);
    }));
    JB_RETURN_IF_ERROR(optional->Next("initial_state", options.has_initial_state, [&](const ffi::AnyBuffer& buffer) {
      call_.state_length = problem_.width - 1;
      return State("initial_state", buffer, &call_.initial_state);
    }));
    return optional->Next("same_sequence", options.has_same_sequence, [&](const ffi::AnyBuffer& buffer) {
      return batch_.Take("same_sequence", buffer, ffi::DataType::U8, {problem_.examples, problem_.length},
                         &call_.same_sequence);
    });
  }

  // A result with the dimensions `trailing` after the batch.
  ffi::Error Result(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                    std::initializer_list<Dimension> trailing, void** data) const {
    BatchOperand result;
    JB_RETURN_IF_ERROR(batch_.Take(name, buffer, type, trailing, &result, /*may_be_shared=*/false));
    *data = buffer.untyped_data();
    return ffi::Error::Success();
  }

  ffi::DataType type() const { return type_; }
  ffi::DataType compute_type() const { return ComputeDataType(type_); }

 private:
  ffi::Error TakeParameter(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<Dimension> trailing,
                           Parameter* parameter) const {
    const ffi::DataType type = buffer.element_type();
    const bool may_be_float32 = compute_type() == ffi::DataType::F32 && type_ != ffi::DataType::F32;
    JB_RETURN_IF_ERROR(CheckType(
        op_, name, buffer, [&] { return TypeName(type_) + (may_be_float32 ? " or F32" : ""); },
        type == type_ || (may_be_float32 && type == ffi::DataType::F32)));
    parameter->type = ElementTypeOf(type);
    return batch_.Take(name, buffer, type, trailing, parameter);
  }

  const char* op_;
  Batch batch_;
  ConvolutionCall& call_;
  Problem& problem_;
  ffi::DataType type_;
};

ffi::Error HandleForward(Context context, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::RemainingArgs optional_operands,
                         ffi::Result<ffi::AnyBuffer> y, ForwardOptions options) {
  ForwardCall call;
  Decoder decoder(kForwardName, &call);
  JB_RETURN_IF_ERROR(decoder.Begin(options, "y", *y, weight, x));
  OptionalOperands optional(kForwardName, optional_operands);
  JB_RETURN_IF_ERROR(decoder.Optional(options, &optional));
  JB_RETURN_IF_ERROR(optional.End());
  call.y = y->untyped_data();
  return ToError(kForwardName, call.Run(context));
}

// `more_results` begins with d_initial_state if there is an initial state.
ffi::Error HandleBackward(Context context, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer d_output,
                          ffi::RemainingArgs optional_operands, ffi::Result<ffi::AnyBuffer> dx,
                          ffi::Result<ffi::AnyBuffer> dweight, ffi::Result<ffi::AnyBuffer> dbias,
                          ffi::RemainingRets more_results, BackwardOptions options) {
  BackwardCall call;
  const Problem& problem = call.problem;
  Decoder decoder(kBackwardName, &call);
  JB_RETURN_IF_ERROR(decoder.Begin(options, "dx", *dx, weight, x));
  JB_RETURN_IF_ERROR(decoder.Sequences("d_output", d_output, &call.d_output));
  OptionalOperands optional(kBackwardName, optional_operands);
  JB_RETURN_IF_ERROR(decoder.Optional(options, &optional));
  JB_RETURN_IF_ERROR(optional.Next("d_final_state", options.has_d_final_state, [&](const ffi::AnyBuffer& buffer) {
    return decoder.State("d_final_state", buffer, &call.d_final_state);
  }));
  JB_RETURN_IF_ERROR(optional.End());
  JB_RETURN_IF_ERROR(
      decoder.Result("dweight", *dweight, decoder.compute_type(), {problem.channels, problem.width}, &call.dweight));
  JB_RETURN_IF_ERROR(decoder.Result("dbias", *dbias, decoder.compute_type(), {problem.channels}, &call.dbias));
  call.dx = dx->untyped_data();
  OptionalResults results(kBackwardName, more_results);
  JB_RETURN_IF_ERROR(results.Next("d_initial_state", options.has_initial_state, [&](const ffi::AnyBuffer& buffer) {
    return decoder.Result("d_initial_state", buffer, decoder.type(),
                          {problem.examples, problem.channels, problem.width - 1}, &call.d_initial_state);
  }));
  return RunCall(context, results, &call);
}

ffi::Error HandleUpdate(Context context, ffi::AnyBuffer x, ffi::AnyBuffer state, ffi::AnyBuffer weight,
                        ffi::RemainingArgs optional_operands, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> new_state, UpdateOptions options) {
  UpdateCall call;
  const Problem& problem = call.problem;
  Decoder decoder(kUpdateName, &call);
  JB_RETURN_IF_ERROR(decoder.Begin(options, "y", *y, weight, x));
  JB_RETURN_IF_ERROR(decoder.LongState(state));
  OptionalOperands optional(kUpdateName, optional_operands);
  JB_RETURN_IF_ERROR(decoder.Optional(options, &optional));
  JB_RETURN_IF_ERROR(optional.End());
  JB_RETURN_IF_ERROR(decoder.Result("new_state", *new_state, decoder.type(),
                                    {problem.examples, problem.channels, call.state_length}, &call.new_state));
  call.y = y->untyped_data();
  return ToError(kUpdateName, call.Run(context));
}

ffi::Error HandleRagged(Context context, ffi::AnyBuffer x, ffi::AnyBuffer states, ffi::AnyBuffer weight,
                        ffi::AnyBuffer starts, ffi::AnyBuffer slots, ffi::AnyBuffer has_state,
                        ffi::RemainingArgs optional_operands, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> new_states, RaggedOptions options) {
  RaggedCall call;
  const Problem& problem = call.problem;
  StatePool& pool = call.pool;
  Decoder decoder(kRaggedName, &call);
  JB_RETURN_IF_ERROR(decoder.Begin(options, "y", *y, weight, x));
  if (problem.examples != 1 || problem.length > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument(kRaggedName, "x has " + std::to_string(problem.examples) + " examples of " +
                                            std::to_string(problem.length) + " times, expected 1 of less than 2^31");
  }
  JB_RETURN_IF_ERROR(decoder.Pool(states, slots, *new_states, /*is_of_examples=*/false, problem.width - 1, &pool));
  if (pool.sequences >= std::numeric_limits<int32_t>::max()) {
    return InvalidArgument(kRaggedName, "slots has " + std::to_string(pool.sequences) + " sequences, expected less");
  }
  JB_RETURN_IF_ERROR(decoder.OfSequences("starts", starts, ffi::DataType::S32, pool.sequences + 1, &call.starts));
  JB_RETURN_IF_ERROR(decoder.OfSequences("has_state", has_state, ffi::DataType::PRED, pool.sequences, &call.has_state));
  OptionalOperands optional(kRaggedName, optional_operands);
  JB_RETURN_IF_ERROR(decoder.Optional(options, &optional));
  JB_RETURN_IF_ERROR(optional.End());
  call.y = y->untyped_data();
  return ToError(kRaggedName, call.Run(context));
}

ffi::Error HandlePoolUpdate(Context context, ffi::AnyBuffer x, ffi::AnyBuffer states, ffi::AnyBuffer weight,
                            ffi::AnyBuffer slots, ffi::RemainingArgs optional_operands, ffi::Result<ffi::AnyBuffer> y,
                            ffi::Result<ffi::AnyBuffer> new_states, PoolUpdateOptions options) {
  PoolUpdateCall call;
  const Problem& problem = call.problem;
  Decoder decoder(kPoolUpdateName, &call);
  JB_RETURN_IF_ERROR(decoder.Begin(options, "y", *y, weight, x));
  OptionalOperands optional(kPoolUpdateName, optional_operands);
  JB_RETURN_IF_ERROR(decoder.Optional(options, &optional));
  JB_RETURN_IF_ERROR(optional.Next("num_accepted", options.has_num_accepted, [&](const ffi::AnyBuffer& buffer) {
    return decoder.OfSequences("num_accepted", buffer, ffi::DataType::S32, problem.examples, &call.num_accepted);
  }));
  JB_RETURN_IF_ERROR(optional.End());
  const int64_t min_length = std::max<int64_t>(problem.width - 1, call.num_written());
  JB_RETURN_IF_ERROR(decoder.Pool(states, slots, *new_states, /*is_of_examples=*/true, min_length, &call.pool));
  call.y = y->untyped_data();
  return ToError(kPoolUpdateName, call.Run(context));
}

JB_TARGET(kForwardName, HandleForward, PlanOf<CallOf<ForwardCall>>, ForwardCall::Strategies());
JB_TARGET(kBackwardName, HandleBackward, PlanOf<CallOf<BackwardCall>>, BackwardCall::Strategies());
JB_TARGET(kUpdateName, HandleUpdate, PlanOf<CallOf<UpdateCall>>, UpdateCall::Strategies());
JB_TARGET(kRaggedName, HandleRagged, PlanOf<CallOf<RaggedCall>>, RaggedCall::Strategies());
JB_TARGET(kPoolUpdateName, HandlePoolUpdate, PlanOf<CallOf<PoolUpdateCall>>, PoolUpdateCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::causal_conv1d
