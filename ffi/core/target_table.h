// The table of FFI targets that a native module exports. Each op's handler file adds its own entries, so a new op needs
// no changes elsewhere.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/core/checked_call.h"
#include "ffi/core/plan.h"
#include "xla/ffi/api/c_api.h"

namespace jax_baracuda {

// The named integers (sizes and flags) that determine how a call runs.
using PlanParameters = std::unordered_map<std::string, int64_t>;

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
  Plan (*plan)(const PlanParameters&);
  std::vector<const char*> strategies;  // all that `plan` can choose
};

// Filled by static initialisers, read by the module's init function.
inline std::vector<Target>& TargetTable() {
  static std::vector<Target> table;
  return table;
}

struct TargetRegistration {
  TargetRegistration(const char* name, XLA_FFI_Handler* handler, Plan (*plan)(const PlanParameters&),
                     std::vector<const char*> strategies) {
    TargetTable().push_back({name, handler, plan, std::move(strategies)});
  }
};

}  // namespace jax_baracuda

#define JB_CONCATENATE_(a, b) a##b
#define JB_CONCATENATE(a, b) JB_CONCATENATE_(a, b)

// Adds the target `name` to the module's table. The handler decodes its calls, and `plan` plans them. The last arguments
// are the names of its strategies.
#define JB_TARGET(name, handler, plan, ...)                                                                   \
  static const ::jax_baracuda::TargetRegistration JB_CONCATENATE(target_, __LINE__)(                          \
      name, [](XLA_FFI_CallFrame* frame) { return ::jax_baracuda::CheckedCall(name, handler, frame); }, plan, \
      {__VA_ARGS__})
