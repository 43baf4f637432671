// The table of FFI targets that a native module exports. Each op's handler file adds its own entries, so a new op needs
// no changes elsewhere.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "ffi/core/checked_call.h"
#include "ffi/core/handler.h"
#include "ffi/core/plan.h"
#include "xla/ffi/api/ffi.h"

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
  explicit TargetRegistration(const Target& target) { TargetTable().push_back(target); }
};

}  // namespace jax_baracuda

#define JB_CONCATENATE_(a, b) a##b
#define JB_CONCATENATE(a, b) JB_CONCATENATE_(a, b)

#define JB_REGISTER_HANDLER_(symbol, name, plan, ...)                                             \
  static const ::jax_baracuda::TargetRegistration JB_CONCATENATE(target_registration_, __LINE__)( \
      ::jax_baracuda::Target{name, ::jax_baracuda::CheckedHandler<symbol>, plan, {__VA_ARGS__}})

#ifdef JB_CUDA
// Handlers can be captured into CUDA graphs, since they launch the same kernels every time.
#define JB_DEFINE_HANDLER_(symbol, handler)                                   \
  XLA_FFI_DEFINE_HANDLER(symbol, handler, ::jax_baracuda::BindingOf(handler), \
                         {::xla::ffi::Traits::kCmdBufferCompatible})
#else
#define JB_DEFINE_HANDLER_(symbol, handler) XLA_FFI_DEFINE_HANDLER(symbol, handler, ::jax_baracuda::BindingOf(handler))
#endif

// Defines the target `name` from the function `handler`, and adds it to the module's table. The last arguments are the
// names of its strategies.
#define JB_TARGET(name, handler, plan, ...)                        \
  JB_DEFINE_HANDLER_(JB_CONCATENATE(handler_, __LINE__), handler); \
  JB_REGISTER_HANDLER_(JB_CONCATENATE(handler_, __LINE__), name, plan, __VA_ARGS__)
