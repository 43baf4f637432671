// The handler of segment_order.
#include "ffi/segment/decoding.h"
#include "ffi/segment/order/call.h"

namespace jax_baracuda::segment {

struct OrderOptions {
  int64_t num_batch_dims, num_segments;
};

}  // namespace jax_baracuda::segment

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::OrderOptions, StructMember<int64_t>("num_batch_dims"),
                                      StructMember<int64_t>("num_segments"));

namespace jax_baracuda::segment {
namespace {

ffi::Error HandleOrder(Context context, ffi::AnyBuffer segment_ids, ffi::Result<ffi::AnyBuffer> order,
                       ffi::Result<ffi::AnyBuffer> sorted_ids, ffi::RemainingRets scratch, OrderOptions options) {
  constexpr const char* kOp = "segment_order";
  OrderCall call;
  call.problem.features = 1;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.First("order", *order, "rows"));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  if (call.ids_are_64_bit) return UnsupportedType(kOp, "segment_ids", segment_ids.element_type());
  const int64_t rows = call.problem.rows;
  JB_RETURN_IF_ERROR(decoder.Vector("order", *order, ffi::DataType::S32, rows, &call.order));
  JB_RETURN_IF_ERROR(decoder.Vector("sorted_ids", *sorted_ids, ffi::DataType::S32, rows, &call.sorted_ids));
  JB_RETURN_IF_ERROR(decoder.Segments(options.num_segments));
  if (options.num_segments > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument(kOp,
                           "num_segments is " + std::to_string(options.num_segments) + ", expected at most 2147483647");
  }
  return RunCall(context, {kOp, scratch}, &call);
}

JB_TARGET("segment_order", HandleOrder, PlanOf<CallOf<OrderCall>>, OrderCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
