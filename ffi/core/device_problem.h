// Whether the GPUs of this machine can run this module's kernels.
#pragma once

#include <string>

namespace jax_baracuda {

// Why a GPU here cannot run kernels that are compiled for these architectures (CMAKE_CUDA_ARCHITECTURES, with spaces
// between them), and what to do about it; empty where all can, and where there is no GPU or no driver, since a program
// for GPUs may be made elsewhere. Makes no CUDA context, which would take memory of each GPU, and fail where a GPU is
// another process's alone.
std::string DeviceProblem(const std::string& architectures);

}  // namespace jax_baracuda
