// The Python exports that the CPU and CUDA modules share.
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
      "strategies",
      [] {
        nanobind::dict strategies;
        for (const Target& target : TargetTable()) {
          nanobind::list names;
          for (const char* name : target.strategies) names.append(name);
          strategies[target.name] = nanobind::tuple(names);
        }
        return strategies;
      },
      "The strategies of this module's kernels: op name -> names.");
  module.def(
      "plan",
      [](const std::string& name, const PlanParameters& parameters) {
        for (const Target& target : TargetTable()) {
          if (target.name != name) continue;
          const Plan plan = target.plan(parameters);
          return nanobind::make_tuple(plan.strategy, plan.scratch_bytes);
        }
        throw std::invalid_argument("no target is named " + name);
      },
      "(strategy, bytes of scratch memory that the op takes as an extra last result) of a call.");
  module.attr("ffi_api_version") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace jax_baracuda
