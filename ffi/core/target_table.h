// The table of the FFI targets that a native module exports. Each op's handler file adds its own entries, so a new op
// changes no file but its own.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "ffi/core/checked_call.h"
#include "xla/ffi/api/ffi.h"

namespace jax_baracuda {

// The integers (extents and flags, by name) that decide how a call runs.
using PlanParameters = std::unordered_map<std::string, int64_t>;

// How a call runs, decided from its shapes and flags alone. The handler decides by the same function.
struct Plan {
  const char* strategy;       // one of the target's strategies
  int64_t scratch_bytes = 0;  // of memory that the handler takes as an extra last result; 0: it takes none
};

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
  Plan (*plan)(const PlanParameters&);
  std::vector<const char*> strategies;  // all that `plan` can choose
};

// Filled by static initialisers, read by the module's init function.
std::vector<Target>& TargetTable();

struct TargetRegistration {
  explicit TargetRegistration(const Target& target) { TargetTable().push_back(target); }
};

}  // namespace jax_baracuda

#define JB_CONCATENATE_(a, b) a##b
#define JB_CONCATENATE(a, b) JB_CONCATENATE_(a, b)

// Adds the op `name`, served by the handler symbol `handler`, to this module's table; the names of its strategies follow.
#define JB_REGISTER_TARGET(name, handler, plan, ...)                                              \
  static const ::jax_baracuda::TargetRegistration JB_CONCATENATE(target_registration_, __LINE__)( \
      ::jax_baracuda::Target{name, ::jax_baracuda::CheckedHandler<handler>, plan, {__VA_ARGS__}})
