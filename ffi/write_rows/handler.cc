// The handler of write_rows.
#include "ffi/core/run.h"
#include "ffi/core/strategies.h"
#include "ffi/write_rows/decoding.h"

namespace jax_baracuda::write_rows {

namespace {

void HandleRows(Arguments& arguments) {
  Call call;
  Decoder(arguments, arguments.NumResultsLeft()).Decode(&call);
  Run(arguments, call);
}

constexpr const char* kStrategyNames[] = {kNothing, "copy", "convert"};

Plan PlanRows(const PlanParameters& parameters) {
  if (parameters.at("batch") == 0 || parameters.at("elements") == 0) return Plan{kNothing};
  return Plan{kStrategyNames[parameters.at("converts") != 0 ? 2 : 1]};
}

JB_TARGET("write_rows", HandleRows, PlanRows, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::write_rows
