// Checks the buffers of the causal_conv1d ops and turns them into calls; used by both back ends.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/core/handler.h"
#include "ffi/core/operands.h"

namespace jax_baracuda::causal_conv1d {

// Checks the buffers of one call, one after another. Output comes first, then Weight: they tell what the others must
// fit.
class Decoder {
 public:
  Decoder(const char* op, Problem* problem, bool channels_last, bool silu) : op_(op), problem_(*problem) {
    problem_ = Problem{};
    problem_.channels_last = channels_last;
    problem_.silu = silu;
  }

  // The result that is shaped as x tells all dimensions but the width, and the element type.
  ffi::Error Output(const char* name, const ffi::AnyBuffer& buffer, ElementType* type) {
    const auto shape = buffer.dimensions();
    if (shape.size() != 4) {
      return WrongShape(op_, name, buffer,
                        problem_.channels_last ? "[batch, examples, length, channels]"
                                               : "[batch, examples, channels, length]");
    }
    problem_.batch = shape[0];
    problem_.examples = shape[1];
    problem_.channels = shape[problem_.channels_last ? 3 : 2];
    problem_.length = shape[problem_.channels_last ? 2 : 3];
    type_ = buffer.element_type();
    *type = ElementTypeOf(type_);
    if (!DispatchFloating(*type, [](auto) {})) return UnsupportedType(op_, name, type_);
    return ffi::Error::Success();
  }

  ffi::Error Weight(const ffi::AnyBuffer& buffer, Parameter* weight) {
    const auto shape = buffer.dimensions();
    const int64_t width = shape.size() == 3 ? shape[2] : 0;
    if (width < 1 || width > kMostWidth) {
      return WrongShape(op_, "weight", buffer,
                        "[batch or 1, channels, width] with a width of 1 to " + std::to_string(kMostWidth));
    }
    problem_.width = static_cast<int>(width);
    return TakeParameter("weight", buffer, {problem_.channels, width}, weight);
  }

  ffi::Error Bias(const ffi::AnyBuffer& buffer, Parameter* bias) const {
    return TakeParameter("bias", buffer, {problem_.channels}, bias);
  }

  // An operand shaped as x.
  ffi::Error Sequences(const char* name, const ffi::AnyBuffer& buffer, Operand* operand) const {
    const std::vector<int64_t> trailing =
        problem_.channels_last ? std::vector<int64_t>{problem_.examples, problem_.length, problem_.channels}
                               : std::vector<int64_t>{problem_.examples, problem_.channels, problem_.length};
    return TakeOperand(name, buffer, type_, trailing, operand);
  }

  // An initial or final state, or its cotangent.
  ffi::Error State(const char* name, const ffi::AnyBuffer& buffer, Operand* operand) const {
    if (problem_.width == 1) return InvalidArgument(op_, std::string(name) + " is empty where the width is 1");
    return TakeOperand(name, buffer, type_, {problem_.examples, problem_.channels, problem_.width - 1}, operand);
  }

  // The state that causal_conv1d_update continues from; its last dimension tells how many inputs it holds.
  ffi::Error LongState(const ffi::AnyBuffer& buffer, int64_t* state_length, Operand* state) const {
    const auto shape = buffer.dimensions();
    if (shape.size() != 4 || shape[3] < problem_.width - 1) {
      return WrongShape(op_, "state", buffer,
                        "[batch or 1, examples, channels, inputs] with at least " +
                            std::to_string(problem_.width - 1) + " inputs");
    }
    *state_length = shape[3];
    return TakeOperand("state", buffer, type_, {problem_.examples, problem_.channels, *state_length}, state);
  }

  ffi::Error Taps(const ffi::AnyBuffer& buffer, Operand* taps) const {
    return TakeOperand("taps", buffer, ffi::DataType::U8, {problem_.examples, problem_.length}, taps);
  }

  // A result with these dimensions behind the batch.
  ffi::Error Result(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                    const std::vector<int64_t>& trailing, void** data) const {
    JB_RETURN_IF_ERROR(CheckType(op_, name, buffer, type));
    JB_RETURN_IF_ERROR(CheckShape(name, buffer, trailing, /*is_shared=*/nullptr));
    *data = buffer.untyped_data();
    return ffi::Error::Success();
  }

  ffi::DataType type() const { return type_; }
  ffi::DataType compute_type() const { return type_ == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32; }

 private:
  // Where `is_shared` is nullptr, the leading dimension must be the batch; else it may be 1, and *is_shared tells
  // whether the batch shares the array.
  ffi::Error CheckShape(const char* name, const ffi::AnyBuffer& buffer, const std::vector<int64_t>& trailing,
                        bool* is_shared) const {
    std::vector<Dimension> dimensions{{problem_.batch, is_shared != nullptr}};
    dimensions.insert(dimensions.end(), trailing.begin(), trailing.end());
    JB_RETURN_IF_ERROR(jax_baracuda::CheckShape(op_, name, buffer, dimensions));
    if (is_shared != nullptr) *is_shared = buffer.dimensions()[0] != problem_.batch;
    return ffi::Error::Success();
  }

  ffi::Error TakeOperand(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                         const std::vector<int64_t>& trailing, Operand* operand) const {
    JB_RETURN_IF_ERROR(CheckType(op_, name, buffer, type));
    JB_RETURN_IF_ERROR(CheckShape(name, buffer, trailing, &operand->is_shared));
    operand->data = buffer.untyped_data();
    return ffi::Error::Success();
  }

  ffi::Error TakeParameter(const char* name, const ffi::AnyBuffer& buffer, const std::vector<int64_t>& trailing,
                           Parameter* parameter) const {
    const ffi::DataType type = buffer.element_type();
    const bool may_be_float32 = compute_type() == ffi::DataType::F32 && type_ != ffi::DataType::F32;
    JB_RETURN_IF_ERROR(CheckType(op_, name, buffer, TypeName(type_) + (may_be_float32 ? " or F32" : ""),
                                 type == type_ || (may_be_float32 && type == ffi::DataType::F32)));
    JB_RETURN_IF_ERROR(CheckShape(name, buffer, trailing, &parameter->is_shared));
    parameter->data = buffer.untyped_data();
    parameter->type = ElementTypeOf(type);
    return ffi::Error::Success();
  }

  const char* op_;
  Problem& problem_;
  ffi::DataType type_;
};

inline ffi::Error DecodeForward(const char* op, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight,
                                ffi::RemainingArgs optional_operands, const ffi::AnyBuffer& y, bool channels_last,
                                bool silu, bool has_bias, bool has_initial_state, bool has_taps, ForwardCall* call) {
  Decoder decoder(op, &call->problem, channels_last, silu);
  JB_RETURN_IF_ERROR(decoder.Output("y", y, &call->type));
  JB_RETURN_IF_ERROR(decoder.Weight(weight, &call->weight));
  JB_RETURN_IF_ERROR(decoder.Sequences("x", x, &call->x));
  OptionalOperands optional(op, optional_operands);
  JB_RETURN_IF_ERROR(optional.Next(
      "bias", has_bias, [&](const ffi::AnyBuffer& buffer) { return decoder.Bias(buffer, &call->bias); }));
  JB_RETURN_IF_ERROR(optional.Next("initial_state", has_initial_state, [&](const ffi::AnyBuffer& buffer) {
    return decoder.State("initial_state", buffer, &call->initial_state);
  }));
  JB_RETURN_IF_ERROR(optional.Next(
      "taps", has_taps, [&](const ffi::AnyBuffer& buffer) { return decoder.Taps(buffer, &call->taps); }));
  JB_RETURN_IF_ERROR(optional.End());
  call->y = y.untyped_data();
  return ffi::Error::Success();
}

// `more_results` begins with d_initial_state where there is an initial state. What follows is left to the back end:
// *num_results tells how many results are decoded. The call's scratch is not set.
inline ffi::Error DecodeBackward(const char* op, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight,
                                 const ffi::AnyBuffer& dy, ffi::RemainingArgs optional_operands,
                                 const ffi::AnyBuffer& dx, const ffi::AnyBuffer& dweight, const ffi::AnyBuffer& dbias,
                                 ffi::RemainingRets more_results, bool channels_last, bool silu, bool has_bias,
                                 bool has_initial_state, bool has_taps, bool has_d_final_state, BackwardCall* call,
                                 size_t* num_results) {
  const Problem& problem = call->problem;
  Decoder decoder(op, &call->problem, channels_last, silu);
  JB_RETURN_IF_ERROR(decoder.Output("dx", dx, &call->type));
  JB_RETURN_IF_ERROR(decoder.Weight(weight, &call->weight));
  JB_RETURN_IF_ERROR(decoder.Sequences("x", x, &call->x));
  JB_RETURN_IF_ERROR(decoder.Sequences("dy", dy, &call->dy));
  OptionalOperands optional(op, optional_operands);
  JB_RETURN_IF_ERROR(optional.Next(
      "bias", has_bias, [&](const ffi::AnyBuffer& buffer) { return decoder.Bias(buffer, &call->bias); }));
  JB_RETURN_IF_ERROR(optional.Next("initial_state", has_initial_state, [&](const ffi::AnyBuffer& buffer) {
    return decoder.State("initial_state", buffer, &call->initial_state);
  }));
  JB_RETURN_IF_ERROR(optional.Next(
      "taps", has_taps, [&](const ffi::AnyBuffer& buffer) { return decoder.Taps(buffer, &call->taps); }));
  JB_RETURN_IF_ERROR(optional.Next("d_final_state", has_d_final_state, [&](const ffi::AnyBuffer& buffer) {
    return decoder.State("d_final_state", buffer, &call->d_final_state);
  }));
  JB_RETURN_IF_ERROR(optional.End());
  JB_RETURN_IF_ERROR(decoder.Result("dweight", dweight, decoder.compute_type(), {problem.channels, problem.width},
                                    &call->dweight));
  JB_RETURN_IF_ERROR(decoder.Result("dbias", dbias, decoder.compute_type(), {problem.channels}, &call->dbias));
  call->dx = dx.untyped_data();
  call->d_initial_state = nullptr;
  *num_results = has_initial_state ? 1 : 0;
  if (!has_initial_state) return ffi::Error::Success();
  if (more_results.empty()) return InvalidArgument(op, "d_initial_state is missing among the results");
  auto d_initial_state = more_results.get<ffi::AnyBuffer>(0);
  if (d_initial_state.has_error()) return d_initial_state.error();
  return decoder.Result("d_initial_state", **d_initial_state, decoder.type(),
                        {problem.examples, problem.channels, problem.width - 1}, &call->d_initial_state);
}

inline ffi::Error DecodeUpdate(const char* op, const ffi::AnyBuffer& x, const ffi::AnyBuffer& state,
                               const ffi::AnyBuffer& weight, ffi::RemainingArgs optional_operands,
                               const ffi::AnyBuffer& y, const ffi::AnyBuffer& new_state, bool channels_last, bool silu,
                               bool has_bias, UpdateCall* call) {
  const Problem& problem = call->problem;
  Decoder decoder(op, &call->problem, channels_last, silu);
  JB_RETURN_IF_ERROR(decoder.Output("y", y, &call->type));
  JB_RETURN_IF_ERROR(decoder.Weight(weight, &call->weight));
  JB_RETURN_IF_ERROR(decoder.Sequences("x", x, &call->x));
  JB_RETURN_IF_ERROR(decoder.LongState(state, &call->state_length, &call->state));
  OptionalOperands optional(op, optional_operands);
  JB_RETURN_IF_ERROR(optional.Next(
      "bias", has_bias, [&](const ffi::AnyBuffer& buffer) { return decoder.Bias(buffer, &call->bias); }));
  JB_RETURN_IF_ERROR(optional.End());
  call->y = y.untyped_data();
  return decoder.Result("new_state", new_state, decoder.type(),
                        {problem.examples, problem.channels, call->state_length}, &call->new_state);
}

// The bindings of the three handlers; those of both back ends differ in their context only.

template <typename Context, int kOperands, int kResults>
auto BindWithOptions() {
  return BindResults<kResults>(BindOperands<kOperands>(ffi::Ffi::Bind().Ctx<Context>()).RemainingArgs());
}

template <typename Context>
auto BindForward() {
  return BindWithOptions<Context, 2, 1>()
      .template Attr<bool>("channels_last")
      .template Attr<bool>("silu")
      .template Attr<bool>("has_bias")
      .template Attr<bool>("has_initial_state")
      .template Attr<bool>("has_taps");
}

template <typename Context>
auto BindBackward() {
  return BindWithOptions<Context, 3, 3>()
      .RemainingRets()
      .template Attr<bool>("channels_last")
      .template Attr<bool>("silu")
      .template Attr<bool>("has_bias")
      .template Attr<bool>("has_initial_state")
      .template Attr<bool>("has_taps")
      .template Attr<bool>("has_d_final_state");
}

template <typename Context>
auto BindUpdate() {
  return BindWithOptions<Context, 3, 2>()
      .template Attr<bool>("channels_last")
      .template Attr<bool>("silu")
      .template Attr<bool>("has_bias");
}

}  // namespace jax_baracuda::causal_conv1d
