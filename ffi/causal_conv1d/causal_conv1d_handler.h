// The handlers of the causal_conv1d ops: they check the buffers, convert them to calls, and pass these to a back end.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/core/batch.h"
#include "ffi/core/handler.h"
#include "ffi/core/operands.h"
#include "ffi/core/target_table.h"

namespace jax_baracuda::causal_conv1d {

inline constexpr const char* kForwardName = "causal_conv1d";
inline constexpr const char* kBackwardName = "causal_conv1d_backward";
inline constexpr const char* kUpdateName = "causal_conv1d_update";

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

namespace jax_baracuda::causal_conv1d {

// The problem described by the parameters of a plan.
inline Problem ProblemOf(const PlanParameters& parameters) {
  return Problem{parameters.at("batch"),
                 parameters.at("examples"),
                 parameters.at("channels"),
                 parameters.at("length"),
                 static_cast<int>(parameters.at("width")),
                 parameters.at("channels_last") != 0,
                 parameters.at("silu") != 0,
                 parameters.at("has_same_sequence") != 0};
}

// Checks the buffers of a call. Call Output first and Weight second: they set the sizes that the other buffers must
// match.
class Decoder {
 public:
  template <typename Options>
  Decoder(const char* op, const Options& options, Problem* problem)
      : op_(op), num_batch_dims_(options.num_batch_dims), batch_(op), problem_(*problem) {
    problem_ = Problem{};
    problem_.channels_last = options.channels_last;
    problem_.silu = options.silu;
  }

  // The result of x's shape sets all dimensions except the width, and the element type.
  ffi::Error Output(const char* name, const ffi::AnyBuffer& buffer, ElementType* type) {
    const char* const trailing = problem_.channels_last ? "examples, length, channels" : "examples, channels, length";
    JB_RETURN_IF_ERROR(batch_.Decode(name, buffer, num_batch_dims_, trailing));
    const BatchedBuffer view = *batch_.View(buffer, /*may_be_shared=*/false);
    if (view.dims.size() != 3) return batch_.WrongRank(name, buffer, trailing);
    problem_.batch = batch_.size();
    problem_.examples = view.dims[0];
    problem_.channels = view.dims[problem_.channels_last ? 2 : 1];
    problem_.length = view.dims[problem_.channels_last ? 1 : 2];
    type_ = view.type;
    *type = ElementTypeOf(type_);
    if (!DispatchFloating(*type, [](auto) {})) return UnsupportedType(op_, name, type_);
    return ffi::Error::Success();
  }

  ffi::Error Weight(const ffi::AnyBuffer& buffer, Parameter* weight) {
    const auto view = batch_.View(buffer, /*may_be_shared=*/true);
    const int64_t width = view && view->dims.size() == 2 ? view->dims[1] : 0;
    if (width < 1 || width > kMaxWidth) {
      return batch_.WrongShape("weight", buffer, /*may_be_shared=*/true,
                               "channels,width of 1 to " + std::to_string(kMaxWidth));
    }
    problem_.width = static_cast<int>(width);
    return TakeParameter("weight", buffer, {problem_.channels, width}, weight);
  }

  ffi::Error Bias(const ffi::AnyBuffer& buffer, Parameter* bias) const {
    return TakeParameter("bias", buffer, {problem_.channels}, bias);
  }

  // An operand of x's shape.
  ffi::Error Sequences(const char* name, const ffi::AnyBuffer& buffer, Operand* operand) const {
    const int64_t second = problem_.channels_last ? problem_.length : problem_.channels;
    const int64_t third = problem_.channels_last ? problem_.channels : problem_.length;
    return TakeOperand(name, buffer, type_, {problem_.examples, second, third}, operand);
  }

  // An initial state, or the cotangent of a final one.
  ffi::Error State(const char* name, const ffi::AnyBuffer& buffer, Operand* operand) const {
    if (problem_.width == 1) return InvalidArgument(op_, std::string(name) + " is empty where the width is 1");
    return TakeOperand(name, buffer, type_, {problem_.examples, problem_.channels, problem_.width - 1}, operand);
  }

  // The old state of causal_conv1d_update; its last dimension is the number of inputs that it holds.
  ffi::Error LongState(const ffi::AnyBuffer& buffer, int64_t* state_length, Operand* state) const {
    const auto view = batch_.View(buffer, /*may_be_shared=*/true);
    *state_length = view && view->dims.size() == 3 ? view->dims[2] : -1;
    if (*state_length < problem_.width - 1) {
      return batch_.WrongShape("state", buffer, /*may_be_shared=*/true,
                               "examples,channels,at least " + std::to_string(problem_.width - 1) + " inputs");
    }
    return TakeOperand("state", buffer, type_, {problem_.examples, problem_.channels, *state_length}, state);
  }

  ffi::Error SameSequence(const ffi::AnyBuffer& buffer, Operand* operand) const {
    return TakeOperand("same_sequence", buffer, ffi::DataType::U8, {problem_.examples, problem_.length}, operand);
  }

  // A result with the dimensions `trailing` after the batch.
  ffi::Error Result(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                    std::initializer_list<Dimension> trailing, void** data) const {
    JB_RETURN_IF_ERROR(CheckType(op_, name, buffer, type));
    BatchedBuffer view;
    JB_RETURN_IF_ERROR(batch_.Check(name, buffer, /*may_be_shared=*/false, trailing, &view));
    *data = view.data;
    return ffi::Error::Success();
  }

  ffi::DataType type() const { return type_; }
  ffi::DataType compute_type() const { return type_ == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32; }

 private:
  ffi::Error TakeOperand(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                         std::initializer_list<Dimension> trailing, Operand* operand) const {
    JB_RETURN_IF_ERROR(CheckType(op_, name, buffer, type));
    BatchedBuffer view;
    JB_RETURN_IF_ERROR(batch_.Check(name, buffer, /*may_be_shared=*/true, trailing, &view));
    operand->data = view.data;
    operand->is_shared = view.is_shared;
    return ffi::Error::Success();
  }

  ffi::Error TakeParameter(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<Dimension> trailing,
                           Parameter* parameter) const {
    const ffi::DataType type = buffer.element_type();
    const bool may_be_float32 = compute_type() == ffi::DataType::F32 && type_ != ffi::DataType::F32;
    JB_RETURN_IF_ERROR(CheckType(
        op_, name, buffer, [&] { return TypeName(type_) + (may_be_float32 ? " or F32" : ""); },
        type == type_ || (may_be_float32 && type == ffi::DataType::F32)));
    BatchedBuffer view;
    JB_RETURN_IF_ERROR(batch_.Check(name, buffer, /*may_be_shared=*/true, trailing, &view));
    *parameter = Parameter{view.data, view.is_shared, ElementTypeOf(type)};
    return ffi::Error::Success();
  }

  const char* op_;
  int64_t num_batch_dims_;
  Batch batch_;
  Problem& problem_;
  ffi::DataType type_;
};

// The optional operands that a convolution and its gradient share.
template <typename Options>
ffi::Error DecodeOptional(const Decoder& decoder, const Options& options, OptionalOperands* optional,
                          ConvolutionCall* call) {
  JB_RETURN_IF_ERROR(optional->Next("bias", options.has_bias,
                                    [&](const ffi::AnyBuffer& buffer) { return decoder.Bias(buffer, &call->bias); }));
  JB_RETURN_IF_ERROR(optional->Next("initial_state", options.has_initial_state, [&](const ffi::AnyBuffer& buffer) {
    call->state_length = call->problem.width - 1;
    return decoder.State("initial_state", buffer, &call->initial_state);
  }));
  call->problem.has_same_sequence = options.has_same_sequence;
  return optional->Next("same_sequence", options.has_same_sequence, [&](const ffi::AnyBuffer& buffer) {
    return decoder.SameSequence(buffer, &call->same_sequence);
  });
}

inline ffi::Error DecodeForward(const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight,
                                ffi::RemainingArgs optional_operands, const ffi::AnyBuffer& y,
                                const ForwardOptions& options, ForwardCall* call) {
  Decoder decoder(kForwardName, options, &call->problem);
  JB_RETURN_IF_ERROR(decoder.Output("y", y, &call->type));
  JB_RETURN_IF_ERROR(decoder.Weight(weight, &call->weight));
  JB_RETURN_IF_ERROR(decoder.Sequences("x", x, &call->x));
  OptionalOperands optional(kForwardName, optional_operands);
  JB_RETURN_IF_ERROR(DecodeOptional(decoder, options, &optional, call));
  call->y = y.untyped_data();
  return optional.End();
}

// `more_results` begins with d_initial_state if there is an initial state. The back end decodes the rest, and sets the
// call's scratch.
inline ffi::Error DecodeBackward(const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight, const ffi::AnyBuffer& dy,
                                 ffi::RemainingArgs optional_operands, const ffi::AnyBuffer& dx,
                                 const ffi::AnyBuffer& dweight, const ffi::AnyBuffer& dbias,
                                 ffi::RemainingRets more_results, const BackwardOptions& options, BackwardCall* call) {
  const Problem& problem = call->problem;
  Decoder decoder(kBackwardName, options, &call->problem);
  JB_RETURN_IF_ERROR(decoder.Output("dx", dx, &call->type));
  JB_RETURN_IF_ERROR(decoder.Weight(weight, &call->weight));
  JB_RETURN_IF_ERROR(decoder.Sequences("x", x, &call->x));
  JB_RETURN_IF_ERROR(decoder.Sequences("dy", dy, &call->dy));
  OptionalOperands optional(kBackwardName, optional_operands);
  JB_RETURN_IF_ERROR(DecodeOptional(decoder, options, &optional, call));
  JB_RETURN_IF_ERROR(optional.Next("d_final_state", options.has_d_final_state, [&](const ffi::AnyBuffer& buffer) {
    return decoder.State("d_final_state", buffer, &call->d_final_state);
  }));
  JB_RETURN_IF_ERROR(optional.End());
  JB_RETURN_IF_ERROR(
      decoder.Result("dweight", dweight, decoder.compute_type(), {problem.channels, problem.width}, &call->dweight));
  JB_RETURN_IF_ERROR(decoder.Result("dbias", dbias, decoder.compute_type(), {problem.channels}, &call->dbias));
  call->dx = dx.untyped_data();
  call->d_initial_state = nullptr;
  if (!options.has_initial_state) return ffi::Error::Success();
  if (more_results.empty()) return InvalidArgument(kBackwardName, "d_initial_state is missing among the results");
  auto d_initial_state = more_results.get<ffi::AnyBuffer>(0);
  if (d_initial_state.has_error()) return d_initial_state.error();
  return decoder.Result("d_initial_state", **d_initial_state, decoder.type(),
                        {problem.examples, problem.channels, problem.width - 1}, &call->d_initial_state);
}

inline ffi::Error DecodeUpdate(const ffi::AnyBuffer& x, const ffi::AnyBuffer& state, const ffi::AnyBuffer& weight,
                               ffi::RemainingArgs optional_operands, const ffi::AnyBuffer& y,
                               const ffi::AnyBuffer& new_state, const UpdateOptions& options, UpdateCall* call) {
  const Problem& problem = call->problem;
  Decoder decoder(kUpdateName, options, &call->problem);
  JB_RETURN_IF_ERROR(decoder.Output("y", y, &call->type));
  JB_RETURN_IF_ERROR(decoder.Weight(weight, &call->weight));
  JB_RETURN_IF_ERROR(decoder.Sequences("x", x, &call->x));
  JB_RETURN_IF_ERROR(decoder.LongState(state, &call->state_length, &call->initial_state));
  OptionalOperands optional(kUpdateName, optional_operands);
  JB_RETURN_IF_ERROR(optional.Next("bias", options.has_bias,
                                   [&](const ffi::AnyBuffer& buffer) { return decoder.Bias(buffer, &call->bias); }));
  JB_RETURN_IF_ERROR(optional.End());
  call->y = y.untyped_data();
  return decoder.Result("new_state", new_state, decoder.type(),
                        {problem.examples, problem.channels, call->state_length}, &call->new_state);
}

// The handlers and their bindings. A back end provides its context (the stream or the thread pool) and the functions
// that run calls.

template <typename Context, ffi::Error (*kRun)(Context, const ForwardCall&)>
ffi::Error HandleForward(Context context, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::RemainingArgs optional_operands,
                         ffi::Result<ffi::AnyBuffer> y, ForwardOptions options) {
  ForwardCall call;
  JB_RETURN_IF_ERROR(DecodeForward(x, weight, optional_operands, *y, options, &call));
  return kRun(context, call);
}

// The back end sets the call's scratch, and decodes `more_results` from index `num_decoded` on.
template <typename Context,
          ffi::Error (*kRun)(Context, BackwardCall*, ffi::RemainingRets more_results, size_t num_decoded)>
ffi::Error HandleBackward(Context context, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer dy,
                          ffi::RemainingArgs optional_operands, ffi::Result<ffi::AnyBuffer> dx,
                          ffi::Result<ffi::AnyBuffer> dweight, ffi::Result<ffi::AnyBuffer> dbias,
                          ffi::RemainingRets more_results, BackwardOptions options) {
  BackwardCall call;
  JB_RETURN_IF_ERROR(
      DecodeBackward(x, weight, dy, optional_operands, *dx, *dweight, *dbias, more_results, options, &call));
  return kRun(context, &call, more_results, options.has_initial_state ? 1 : 0);
}

template <typename Context, ffi::Error (*kRun)(Context, const UpdateCall&)>
ffi::Error HandleUpdate(Context context, ffi::AnyBuffer x, ffi::AnyBuffer state, ffi::AnyBuffer weight,
                        ffi::RemainingArgs optional_operands, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> new_state, UpdateOptions options) {
  UpdateCall call;
  JB_RETURN_IF_ERROR(DecodeUpdate(x, state, weight, optional_operands, *y, *new_state, options, &call));
  return kRun(context, call);
}

template <typename Context>
auto BindForward() {
  return BindWithOptionalOperands<Context, 2, 1>().template Attrs<ForwardOptions>();
}

template <typename Context>
auto BindBackward() {
  return BindWithOptionalOperands<Context, 3, 3>().RemainingRets().template Attrs<BackwardOptions>();
}

template <typename Context>
auto BindUpdate() {
  return BindWithOptionalOperands<Context, 3, 2>().template Attrs<UpdateOptions>();
}

}  // namespace jax_baracuda::causal_conv1d
