// The native module of the CUDA kernels. Importing it needs neither a GPU nor a driver: cudart is linked statically.
#include "ffi/core/device_problem.h"
#include "ffi/core/python_module.h"

NB_MODULE(_cuda, module) {
  jax_baracuda::ExportTargets(module);
  module.def(
      "device_problem", &jax_baracuda::DeviceProblem, nanobind::arg("architectures") = JAX_BARACUDA_CUDA_ARCHITECTURES,
      nanobind::call_guard<nanobind::gil_scoped_release>(),
      "Why a GPU of this machine cannot run kernels for these architectures, and what to do about it; \"\" if all "
      "can.");
  module.attr("architectures") = JAX_BARACUDA_CUDA_ARCHITECTURES;
  module.attr("compiler_version") = JAX_BARACUDA_CUDA_COMPILER_VERSION;
}
