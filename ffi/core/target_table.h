// The table of the FFI targets that a native module exports. Each op's handler file adds its own entries, so a new op
// changes no file but its own.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_baracuda {

// The integers (shape parameters and flags, by name) that an op's scratch size depends on.
using ScratchParameters = std::unordered_map<std::string, int64_t>;

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
  // Bytes of scratch memory that the handler takes as an extra last result; nullptr where it takes none.
  int64_t (*scratch_bytes)(const ScratchParameters&);
};

// Filled by static initialisers, read by the module's init function.
std::vector<Target>& TargetTable();

struct TargetRegistration {
  explicit TargetRegistration(const Target& target) { TargetTable().push_back(target); }
};

}  // namespace jax_baracuda

#define JB_CONCATENATE_(a, b) a##b
#define JB_CONCATENATE(a, b) JB_CONCATENATE_(a, b)

// Adds the op `name`, served by the handler symbol `handler`, to this module's table.
#define JB_REGISTER_TARGET(name, handler, scratch_bytes)                                        \
  static const ::jax_baracuda::TargetRegistration JB_CONCATENATE(target_registration_, __LINE__)( \
      ::jax_baracuda::Target{name, handler, scratch_bytes})
