// What the CPU and the CUDA module export to Python in the same way.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unordered_map.h>

#include <stdexcept>
#include <string>

#include "ffi/core/target_table.h"

namespace jax_baracuda {

inline void ExportTargets(nanobind::module_& module) {
  module.def(
      "targets",
      [] {
        nanobind::dict targets;
        for (const Target& target : TargetTable()) {
          targets[target.name] = nanobind::capsule(reinterpret_cast<void*>(target.handler));
        }
        return targets;
      },
      "The FFI handlers of this module: op name -> capsule for jax.ffi.register_ffi_target.");
  module.def(
      "scratch_bytes",
      [](const std::string& name, const ScratchParameters& parameters) -> int64_t {
        for (const Target& target : TargetTable()) {
          if (target.name == name) return target.scratch_bytes == nullptr ? 0 : target.scratch_bytes(parameters);
        }
        throw std::invalid_argument("no target is named " + name);
      },
      "Bytes of scratch memory that the op needs as an extra last result.");
  module.attr("ffi_api_version") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace jax_baracuda
