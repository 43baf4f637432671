// The native module of the CUDA kernels. Importing it needs neither a GPU nor a driver: cudart is linked statically.
#include "ffi/core/python_module.h"

NB_MODULE(_cuda, module) {
  jax_baracuda::ExportTargets(module);
  module.attr("architectures") = JAX_BARACUDA_CUDA_ARCHITECTURES;
  module.attr("compiler_version") = JAX_BARACUDA_CUDA_COMPILER_VERSION;
}
