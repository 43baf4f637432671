// The handlers of segment_prod and its gradient.
#include "ffi/segment/decoding.h"
#include "ffi/segment/product/call.h"

namespace jax_baracuda::segment {
namespace {

template <bool kHasResidual>
ffi::Error HandleProduct(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                         ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets more_results,
                         ReductionOptions options) {
  constexpr const char* kOp = kHasResidual ? "segment_prod_with_residual" : "segment_prod";
  ProductCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.Reduction(data, segment_ids, *output, &call.data, &call.output));
  const bool has_kernel = kHasResidual ? IsFloating(call.type) : DispatchWrapping(call.type, [](auto) {});
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, has_kernel));
  OptionalResults results(kOp, more_results);
  JB_RETURN_IF_ERROR(results.Next("mantissa", kHasResidual, [&](const ffi::AnyBuffer& mantissa) {
    return decoder.Cells("mantissa", mantissa, ComputeDataType(decoder.type()), &call.mantissa);
  }));
  JB_RETURN_IF_ERROR(results.Next("packed", kHasResidual, [&](const ffi::AnyBuffer& packed) {
    return decoder.Cells("packed", packed, ffi::DataType::S32, &call.packed);
  }));
  call.indices_are_sorted = options.indices_are_sorted;
  return RunCall(context, results, &call);
}

ffi::Error HandleProductBackward(Context context, ffi::AnyBuffer d_output, ffi::AnyBuffer mantissa,
                                 ffi::AnyBuffer packed, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                                 ffi::Result<ffi::AnyBuffer> d_data, ffi::RemainingRets scratch,
                                 GatherOptions options) {
  constexpr const char* kOp = "segment_prod_backward";
  ProductBackwardCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.First("d_data", *d_data, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("d_data", *d_data, &call.d_data));
  JB_RETURN_IF_ERROR(decoder.Rows("data", data, &call.data));
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_output", d_output, decoder.type(), &call.d_output));
  JB_RETURN_IF_ERROR(decoder.Cells("mantissa", mantissa, ComputeDataType(decoder.type()), &call.mantissa));
  JB_RETURN_IF_ERROR(decoder.Like("mantissa", mantissa, "packed", packed, ffi::DataType::S32, &call.packed));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "d_output", d_output, IsFloating(call.type)));
  return RunCall(context, {kOp, scratch}, &call);
}

JB_TARGET("segment_prod", HandleProduct</*kHasResidual=*/false>, PlanOf<CallOf<ProductCall>>,
          ProductCall::Strategies());
JB_TARGET("segment_prod_with_residual", HandleProduct</*kHasResidual=*/true>, PlanOf<CallOf<ProductCall>>,
          ProductCall::Strategies());
JB_TARGET("segment_prod_backward", HandleProductBackward, PlanOf<CallOf<ProductBackwardCall>>,
          ProductBackwardCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
