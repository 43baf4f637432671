// The native module of the CPU kernels.
#include "ffi/core/python_module.h"

NB_MODULE(_cpu, module) { jax_baracuda::ExportTargets(module); }
