// The handler of write_rows.
#include "ffi/core/run.h"
#include "ffi/core/strategies.h"
#include "ffi/write_rows/decoding.h"

namespace jax_baracuda::write_rows {

struct Attributes {
  int64_t axis;
  bool has_layer, has_unique_slots;
  ffi::Span<const int64_t> scales;  // a ScaleKind for each pool
  int64_t num_batch_dims;
};

}  // namespace jax_baracuda::write_rows

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::write_rows::Attributes, StructMember<int64_t>("axis"),
                                      StructMember<bool>("has_layer"), StructMember<bool>("has_unique_slots"),
                                      StructMember<ffi::Span<const int64_t>>("scales"),
                                      StructMember<int64_t>("num_batch_dims"));

namespace jax_baracuda::write_rows {
namespace {

ffi::Error HandleRows(Context context, ffi::RemainingArgs operands, ffi::RemainingRets results, Attributes attributes) {
  constexpr const char* kOp = "write_rows";
  Call call;
  Decoder decoder(kOp, operands, operands.size(), results, results.size());
  JB_RETURN_IF_ERROR(decoder.Decode(attributes, &call));
  return ToError(kOp, call.Run(context));
}

constexpr const char* kStrategyNames[] = {kNothing, "copy", "convert"};

Plan PlanRows(const PlanParameters& parameters) {
  if (parameters.at("batch") == 0 || parameters.at("elements") == 0) return Plan{kNothing};
  return Plan{kStrategyNames[parameters.at("converts") != 0 ? 2 : 1]};
}

JB_TARGET("write_rows", HandleRows, PlanRows, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::write_rows
