// Whether the GPUs of this machine can run this module's kernels.
#pragma once

#include <string>

namespace jax_baracuda {

// Why a GPU of this machine cannot run kernels compiled for these architectures (CMAKE_CUDA_ARCHITECTURES, separated by
// spaces), and what to do about it. Empty if all GPUs can. Also empty without a GPU or a driver: such a machine may
// still lower programs for GPUs. Creates no CUDA context: a context uses memory of each GPU, and creating one fails if
// another process holds a GPU exclusively.
std::string DeviceProblem(const std::string& architectures);

}  // namespace jax_baracuda
