// The handler of segment_order.
#include "ffi/segment/decoding.h"
#include "ffi/segment/order/call.h"

namespace jax_baracuda::segment {
namespace {

void HandleOrder(Arguments& arguments) {
  const Buffer segment_ids = arguments.Operand("segment_ids");
  const Buffer order = arguments.Result("order"), sorted_ids = arguments.Result("sorted_ids");
  OrderCall call;
  call.problem.features = 1;
  Decoder decoder(arguments, &call);
  decoder.First(order, "rows");
  decoder.Ids(segment_ids);
  segment_ids.CheckType(XLA_FFI_DataType_S32);
  const int64_t rows = call.problem.rows;
  decoder.Vector(order, XLA_FFI_DataType_S32, rows, &call.order);
  decoder.Vector(sorted_ids, XLA_FFI_DataType_S32, rows, &call.sorted_ids);
  decoder.Segments(arguments.Integer("num_segments"));
  if (call.problem.segments > std::numeric_limits<int32_t>::max()) {
    throw InvalidArgument("num_segments is " + std::to_string(call.problem.segments) + ", expected at most 2147483647");
  }
  RunWithScratch(arguments, &call);
}

JB_TARGET("segment_order", HandleOrder, PlanOf<CallOf<OrderCall>>, OrderCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
