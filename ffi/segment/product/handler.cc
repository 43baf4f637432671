// The handlers of segment_prod and its gradient.
#include "ffi/segment/decoding.h"
#include "ffi/segment/product/call.h"

namespace jax_baracuda::segment {
namespace {

template <bool kHasResidual>
void HandleProduct(Arguments& arguments) {
  const Buffer data = arguments.Operand("data"), segment_ids = arguments.Operand("segment_ids");
  const Buffer output = arguments.Result("output");
  ProductCall call;
  Decoder decoder(arguments, &call);
  decoder.Reduction(data, segment_ids, output, &call.data, &call.output);
  data.CheckKernel(kHasResidual ? IsFloating(call.type) : DispatchWrapping(call.type, [](auto) {}));
  if (kHasResidual) {
    decoder.Cells(arguments.Result("mantissa"), ComputeDataType(decoder.type()), &call.mantissa);
    decoder.Cells(arguments.Result("packed"), XLA_FFI_DataType_S32, &call.packed);
  }
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  RunWithScratch(arguments, &call);
}

void HandleProductBackward(Arguments& arguments) {
  const Buffer d_output = arguments.Operand("d_output"), mantissa = arguments.Operand("mantissa");
  const Buffer packed = arguments.Operand("packed"), data = arguments.Operand("data");
  const Buffer segment_ids = arguments.Operand("segment_ids"), d_data = arguments.Result("d_data");
  ProductBackwardCall call;
  Decoder decoder(arguments, &call);
  decoder.First(d_data, "rows, ...");
  decoder.Ids(segment_ids);
  decoder.FirstRows(d_data, &call.d_data);
  decoder.Rows(data, &call.data);
  decoder.FirstCells(d_output, decoder.type(), &call.d_output);
  decoder.Cells(mantissa, ComputeDataType(decoder.type()), &call.mantissa);
  decoder.Like(mantissa, packed, XLA_FFI_DataType_S32, &call.packed);
  d_output.CheckKernel(IsFloating(call.type));
  RunWithScratch(arguments, &call);
}

JB_TARGET("segment_prod", HandleProduct</*kHasResidual=*/false>, PlanOf<CallOf<ProductCall>>,
          ProductCall::Strategies());
JB_TARGET("segment_prod_with_residual", HandleProduct</*kHasResidual=*/true>, PlanOf<CallOf<ProductCall>>,
          ProductCall::Strategies());
JB_TARGET("segment_prod_backward", HandleProductBackward, PlanOf<CallOf<ProductBackwardCall>>,
          ProductBackwardCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
