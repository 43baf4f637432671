// Whether the GPUs of this machine can run this module's kernels.
#pragma once

#include <string>

namespace jax_baracuda {

// Why a GPU here cannot, and what to do about it; empty where all can, and where there is no GPU or no driver, since a
// program for GPUs may be made elsewhere. Makes a CUDA context on each GPU.
std::string DeviceProblem();

}  // namespace jax_baracuda
