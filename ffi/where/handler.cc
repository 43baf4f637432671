// The handlers of where and its gradient.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/core/bit_width.h"
#include "ffi/core/integers.h"
#include "ffi/core/operands.h"
#include "ffi/core/run.h"
#include "ffi/core/target_table.h"
#include "ffi/where/where.h"

namespace jax_baracuda::where {
namespace {

// An operand; each dimension is the output's or 1.
ffi::Error TakeOperand(const char* op, const char* name, const ffi::AnyBuffer& buffer,
                       ffi::AnyBuffer::Dimensions output, Operand* operand) {
  std::vector<Dimension> dimensions;
  for (const int64_t size : output) dimensions.emplace_back(size, /*or_one=*/true);
  JB_RETURN_IF_ERROR(CheckShape(op, name, buffer, dimensions));
  operand->data = buffer.untyped_data();
  if (MakeRepetition(output, buffer.dimensions(), &operand->repetition)) return ffi::Error::Success();
  return InvalidArgument(op, std::string(name) + " has shape " + ShapeString(buffer.dimensions()) +
                                 ", which is repeated along too many dimensions");
}

ffi::Error TakeCondition(const char* op, const ffi::AnyBuffer& cond, ffi::AnyBuffer::Dimensions output,
                         Operand* operand) {
  const ffi::DataType type = cond.element_type();
  JB_RETURN_IF_ERROR(CheckType(
      op, "cond", cond, [] { return "PRED or U8"; }, type == ffi::DataType::PRED || type == ffi::DataType::U8));
  return TakeOperand(op, "cond", cond, output, operand);
}

ffi::Error DecodeSelect(const char* op, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, const ffi::AnyBuffer& cond,
                        const ffi::AnyBuffer& output, SelectCall* call) {
  const ffi::DataType type = output.element_type();
  const auto dimensions = output.dimensions();
  call->element_bytes = WholeByteWidth(type);
  if (call->element_bytes == 0) return UnsupportedType(op, "output", type);
  call->size = TrailingSize(output, 0);
  call->output = output.untyped_data();
  JB_RETURN_IF_ERROR(CheckType(op, "a", a, type));
  JB_RETURN_IF_ERROR(CheckType(op, "b", b, type));
  JB_RETURN_IF_ERROR(TakeOperand(op, "a", a, dimensions, &call->a));
  JB_RETURN_IF_ERROR(TakeOperand(op, "b", b, dimensions, &call->b));
  JB_RETURN_IF_ERROR(TakeCondition(op, cond, dimensions, &call->cond));
  for (size_t i = 0; i < dimensions.size(); ++i) {
    if (dimensions[i] == 1 || dimensions[i] == a.dimensions()[i] || dimensions[i] == b.dimensions()[i] ||
        dimensions[i] == cond.dimensions()[i]) {
      continue;
    }
    return InvalidArgument(op, "output has shape " + ShapeString(dimensions) + ", expected 1 in dimension " +
                                   std::to_string(i) + " as in all operands");
  }
  return ffi::Error::Success();
}

// The cotangent of an operand. It has either the shape and type of d_output, or the compute type and size 1 in adjacent
// dimensions, over which it is summed.
ffi::Error TakeCotangent(const char* op, const char* name, const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& d_output,
                         void** data, bool* is_summed, Sum* sum) {
  const auto own = buffer.dimensions(), whole = d_output.dimensions();
  *data = buffer.untyped_data();
  *is_summed = false;
  const ffi::DataType type = d_output.element_type();
  if (buffer.element_type() == type && own.size() == whole.size() &&
      std::equal(own.begin(), own.end(), whole.begin())) {
    return ffi::Error::Success();
  }
  std::vector<Dimension> dimensions;
  for (const int64_t size : whole) dimensions.emplace_back(size, /*or_one=*/true);
  JB_RETURN_IF_ERROR(CheckShape(op, name, buffer, dimensions));
  if (!IsFloating(ElementTypeOf(type))) return UnsupportedType(op, "d_output", type);
  JB_RETURN_IF_ERROR(CheckType(op, name, buffer, ComputeDataType(type)));
  *is_summed = true;
  if (MakeSum(whole, own, sum)) return ffi::Error::Success();
  return WrongShape(op, name, buffer, "sizes of 1 in neighbouring dimensions only");
}

ffi::Error DecodeSplit(const char* op, const ffi::AnyBuffer& d_output, const ffi::AnyBuffer& cond,
                       const ffi::AnyBuffer& da, const ffi::AnyBuffer& db, SplitCall* call) {
  call->element_bytes = WholeByteWidth(d_output.element_type());
  if (call->element_bytes == 0) return UnsupportedType(op, "d_output", d_output.element_type());
  call->type = ElementTypeOf(d_output.element_type());
  call->size = TrailingSize(d_output, 0);
  call->d_output = d_output.untyped_data();
  JB_RETURN_IF_ERROR(TakeCondition(op, cond, d_output.dimensions(), &call->cond));
  Sum sum_of_b{};
  JB_RETURN_IF_ERROR(TakeCotangent(op, "da", da, d_output, &call->da, &call->a_is_summed, &call->sum));
  JB_RETURN_IF_ERROR(TakeCotangent(op, "db", db, d_output, &call->db, &call->b_is_summed, &sum_of_b));
  if (call->a_is_summed && call->b_is_summed && !(call->sum == sum_of_b)) {
    return InvalidArgument(op, "db has shape " + ShapeString(db.dimensions()) + ", expected that of da, " +
                                   ShapeString(da.dimensions()) + ", or that of d_output");
  }
  if (call->b_is_summed) call->sum = sum_of_b;
  return ffi::Error::Success();
}

ffi::Error HandleSelect(Context context, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer cond,
                        ffi::Result<ffi::AnyBuffer> output) {
  constexpr const char* kOp = "where";
  SelectCall call;
  JB_RETURN_IF_ERROR(DecodeSelect(kOp, a, b, cond, *output, &call));
  return ToError(kOp, call.Run(context));
}

ffi::Error HandleSplit(Context context, ffi::AnyBuffer d_output, ffi::AnyBuffer cond, ffi::Result<ffi::AnyBuffer> da,
                       ffi::Result<ffi::AnyBuffer> db, ffi::RemainingRets scratch) {
  constexpr const char* kOp = "where_backward";
  SplitCall call;
  JB_RETURN_IF_ERROR(DecodeSplit(kOp, d_output, cond, *da, *db, &call));
  return RunCall(context, {kOp, scratch}, &call);
}

// ---- The calls described by the parameters of a plan, without data. Shapes are given dimension by dimension.

std::vector<int64_t> ShapeOf(const PlanParameters& parameters, const std::string& name) {
  std::vector<int64_t> shape(parameters.at("rank"));
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = parameters.at(name + "_size_" + std::to_string(i));
  return shape;
}

int64_t SizeOf(const std::vector<int64_t>& shape) {
  int64_t size = 1;
  for (const int64_t dimension : shape) size = MultiplySizes(size, dimension);
  return size;
}

SelectCall SelectOf(const PlanParameters& parameters) {
  const std::vector<int64_t> output = ShapeOf(parameters, "output");
  SelectCall call{};
  call.size = SizeOf(output);
  call.element_bytes = static_cast<int>(parameters.at("element_bytes"));
  MakeRepetition(output, ShapeOf(parameters, "a"), &call.a.repetition);
  MakeRepetition(output, ShapeOf(parameters, "b"), &call.b.repetition);
  MakeRepetition(output, ShapeOf(parameters, "cond"), &call.cond.repetition);
  return call;
}

SplitCall SplitOf(const PlanParameters& parameters) {
  const std::vector<int64_t> d_output = ShapeOf(parameters, "d_output");
  SplitCall call{};
  call.size = SizeOf(d_output);
  call.element_bytes = static_cast<int>(parameters.at("element_bytes"));
  call.a_is_summed = parameters.at("a_is_summed") != 0;
  call.b_is_summed = parameters.at("b_is_summed") != 0;
  MakeRepetition(d_output, ShapeOf(parameters, "cond"), &call.cond.repetition);
  if (call.a_is_summed) MakeSum(d_output, ShapeOf(parameters, "da"), &call.sum);
  if (call.b_is_summed) MakeSum(d_output, ShapeOf(parameters, "db"), &call.sum);
  return call;
}

JB_TARGET("where", HandleSelect, PlanOf<SelectOf>, SelectCall::Strategies());
JB_TARGET("where_backward", HandleSplit, PlanOf<SplitOf>, SplitCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::where
