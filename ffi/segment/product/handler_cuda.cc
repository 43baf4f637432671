// The CUDA handlers of segment_prod and its gradient.

#include "ffi/segment/engine/strategies.h"
#include "ffi/segment/product/launch.cuh"

namespace jax_baracuda::segment {
namespace {

ffi::Error Forward(const char* op, int64_t num_batch_dims, cudaStream_t stream, const ffi::AnyBuffer& data,
                   const ffi::AnyBuffer& segment_ids,
                   const ffi::AnyBuffer& output, const ffi::AnyBuffer* mantissa, const ffi::AnyBuffer* packed,
                   ffi::RemainingRets scratch_result, bool indices_are_sorted) {
  ProductBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeProduct(op, num_batch_dims, data, segment_ids, output, mantissa, packed, &decoded));
  const bool supported = mantissa != nullptr ? DispatchFloating(decoded.type, [](auto) {})
                                             : DispatchWrapping(decoded.type, [](auto) {});
  if (!supported) return UnsupportedType(op, "data", data.element_type());
  const Plan plan = PlanProduct(decoded.problem, ElementBytes(data), indices_are_sorted);
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(op, scratch_result, plan.scratch_bytes, &scratch));
  const ProductArguments arguments{decoded.problem,
                                   decoded.type,
                                   decoded.ids_are_64_bit,
                                   indices_are_sorted,
                                   data.untyped_data(),
                                   segment_ids.untyped_data(),
                                   output.untyped_data(),
                                   decoded.mantissa,
                                   decoded.packed,
                                   scratch.data,
                                   scratch.bytes};
  return ToError(op, LaunchProduct(arguments, stream));
}

ffi::Error Prod(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets scratch, bool indices_are_sorted,
                int64_t num_batch_dims) {
  return Forward("segment_prod", num_batch_dims, stream, data, segment_ids, *output, nullptr, nullptr, scratch,
                 indices_are_sorted);
}

ffi::Error ProdWithResidual(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                            ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> mantissa,
                            ffi::Result<ffi::AnyBuffer> packed, ffi::RemainingRets scratch, bool indices_are_sorted,
                            int64_t num_batch_dims) {
  return Forward("segment_prod_with_residual", num_batch_dims, stream, data, segment_ids, *output, &*mantissa,
                 &*packed, scratch, indices_are_sorted);
}

ffi::Error ProdBackward(cudaStream_t stream, ffi::AnyBuffer d_output, ffi::AnyBuffer mantissa, ffi::AnyBuffer packed,
                        ffi::AnyBuffer data, ffi::AnyBuffer segment_ids, ffi::Result<ffi::AnyBuffer> d_data,
                        int64_t num_batch_dims) {
  constexpr const char* kOp = "segment_prod_backward";
  ProductBackwardBuffers decoded;
  JB_RETURN_IF_ERROR(
      DecodeProductBackward(kOp, num_batch_dims, d_output, mantissa, packed, data, segment_ids, *d_data, &decoded));
  if (!DispatchFloating(decoded.type, [](auto) {})) return UnsupportedType(kOp, "d_output", d_output.element_type());
  const ProductBackwardArguments arguments{decoded.problem,
                                           decoded.type,
                                           decoded.ids_are_64_bit,
                                           d_output.untyped_data(),
                                           mantissa.untyped_data(),
                                           static_cast<const int32_t*>(packed.untyped_data()),
                                           data.untyped_data(),
                                           segment_ids.untyped_data(),
                                           d_data->untyped_data(),
                                           decoded.d_output_is_shared,
                                           decoded.product_is_shared};
  return ToError(kOp, LaunchProductBackward(arguments, stream));
}

template <int kResults>
auto BindForward() {
  return BindBuffers<Stream, 2, kResults>().RemainingRets().template Attr<bool>("indices_are_sorted")
      .template Attr<int64_t>("num_batch_dims");
}

XLA_FFI_DEFINE_HANDLER(kProd, Prod, BindForward<1>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kProdWithResidual, ProdWithResidual, BindForward<3>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kProdBackward, ProdBackward, (BindBuffers<Stream, 5, 1>().Attr<int64_t>("num_batch_dims")),
                       {ffi::Traits::kCmdBufferCompatible});

Plan PlanOf(const PlanParameters& parameters) {
  const PlanRequest call(parameters);
  return PlanProduct(call.problem, call.element_bytes, call.indices_are_sorted);
}

Plan PlanOfBackward(const PlanParameters& parameters) {
  const PlanRequest call(parameters);
  return PlanProductBackward(call.problem, call.element_bytes);
}

JB_REGISTER_TARGET("segment_prod", kProd, PlanOf, kNothing, JB_REDUCE_STRATEGIES);
JB_REGISTER_TARGET("segment_prod_with_residual", kProdWithResidual, PlanOf, kNothing, JB_REDUCE_STRATEGIES);
JB_REGISTER_TARGET("segment_prod_backward", kProdBackward, PlanOfBackward, kNothing, JB_MAP_ROWS_STRATEGIES);

}  // namespace
}  // namespace jax_baracuda::segment
