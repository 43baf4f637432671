// The native module of the CPU kernels.
#include "ffi/core/python_module.h"

NB_MODULE(_cpu, module) {
  jax_baracuda::ExportTargets(module);
  // Why the CUDA module was not built beside this one; empty if it was.
  module.attr("without_cuda") = JAX_BARACUDA_WITHOUT_CUDA;
}
