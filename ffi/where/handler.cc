// The handlers of where and its gradient.

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/core/arguments.h"
#include "ffi/core/bit_width.h"
#include "ffi/core/run.h"
#include "ffi/core/target_table.h"
#include "ffi/where/where.h"

namespace jax_baracuda::where {
namespace {

// Checks that each dimension of an array is the whole's or 1.
void CheckBroadcast(const Buffer& buffer, IntegerSpan whole) {
  std::vector<Dimension> dimensions;
  for (const int64_t size : whole) dimensions.emplace_back(size, /*or_one=*/true);
  if (!Fits(buffer.dims, dimensions)) throw buffer.WrongShape(ShapeString(dimensions));
}

Operand TakeOperand(const Buffer& buffer, IntegerSpan output) {
  CheckBroadcast(buffer, output);
  Operand operand{buffer.data, {}};
  if (MakeRepetition(output, buffer.dims, &operand.repetition)) return operand;
  throw buffer.Wrong("has shape " + ShapeString(buffer.dims) + ", which is repeated along too many dimensions");
}

Operand TakeCondition(const Buffer& cond, IntegerSpan output) {
  if (cond.type != XLA_FFI_DataType_PRED && cond.type != XLA_FFI_DataType_U8) throw cond.WrongType("PRED or U8");
  return TakeOperand(cond, output);
}

// The cotangent of an operand. It has either the shape and type of d_output, or the compute type and size 1 in adjacent
// dimensions, over which it is summed.
void TakeCotangent(const Buffer& buffer, const Buffer& d_output, void** data, bool* is_summed, Sum* sum) {
  *data = buffer.data;
  *is_summed = buffer.type != d_output.type || !(buffer.dims == d_output.dims);
  if (!*is_summed) return;
  CheckBroadcast(buffer, d_output.dims);
  d_output.CheckKernel(IsFloating(ElementTypeOf(d_output.type)));
  buffer.CheckType(ComputeDataType(d_output.type));
  if (!MakeSum(d_output.dims, buffer.dims, sum)) {
    throw buffer.WrongShape("sizes of 1 in neighbouring dimensions only");
  }
}

void HandleSelect(Arguments& arguments) {
  const Buffer a = arguments.Operand("a"), b = arguments.Operand("b"), cond = arguments.Operand("cond");
  const Buffer output = arguments.Result("output");
  SelectCall call;
  call.element_bytes = WholeByteWidth(output.type);
  output.CheckKernel(call.element_bytes > 0);
  call.size = output.Size();
  call.output = output.data;
  a.CheckType(output.type);
  b.CheckType(output.type);
  call.a = TakeOperand(a, output.dims);
  call.b = TakeOperand(b, output.dims);
  call.cond = TakeCondition(cond, output.dims);
  for (size_t i = 0; i < output.dims.size(); ++i) {
    const int64_t size = output.dims[i];
    if (size != 1 && size != a.dims[i] && size != b.dims[i] && size != cond.dims[i]) {
      throw output.WrongShape("1 in dimension " + std::to_string(i) + " as in all operands");
    }
  }
  Run(arguments, call);
}

void HandleSplit(Arguments& arguments) {
  const Buffer d_output = arguments.Operand("d_output"), cond = arguments.Operand("cond");
  const Buffer da = arguments.Result("da"), db = arguments.Result("db");
  SplitCall call;
  call.element_bytes = WholeByteWidth(d_output.type);
  d_output.CheckKernel(call.element_bytes > 0);
  call.type = ElementTypeOf(d_output.type);
  call.size = d_output.Size();
  call.d_output = d_output.data;
  call.cond = TakeCondition(cond, d_output.dims);
  Sum sum_of_b{};
  TakeCotangent(da, d_output, &call.da, &call.a_is_summed, &call.sum);
  TakeCotangent(db, d_output, &call.db, &call.b_is_summed, &sum_of_b);
  if (call.a_is_summed && call.b_is_summed && !(call.sum == sum_of_b)) {
    throw db.WrongShape("that of da, " + ShapeString(da.dims) + ", or that of d_output");
  }
  if (call.b_is_summed) call.sum = sum_of_b;
  RunWithScratch(arguments, &call);
}

// ---- The calls described by the parameters of a plan, without data. Shapes are given dimension by dimension.

std::vector<int64_t> ShapeOf(const PlanParameters& parameters, const std::string& name) {
  std::vector<int64_t> shape(parameters.at("rank"));
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = parameters.at(name + "_size_" + std::to_string(i));
  return shape;
}

SelectCall SelectOf(const PlanParameters& parameters) {
  const std::vector<int64_t> output = ShapeOf(parameters, "output");
  SelectCall call{};
  call.size = NumElements(output);
  call.element_bytes = static_cast<int>(parameters.at("element_bytes"));
  MakeRepetition(output, ShapeOf(parameters, "a"), &call.a.repetition);
  MakeRepetition(output, ShapeOf(parameters, "b"), &call.b.repetition);
  MakeRepetition(output, ShapeOf(parameters, "cond"), &call.cond.repetition);
  return call;
}

SplitCall SplitOf(const PlanParameters& parameters) {
  const std::vector<int64_t> d_output = ShapeOf(parameters, "d_output");
  SplitCall call{};
  call.size = NumElements(d_output);
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
