// What runs a call in the module that a file is compiled for, and what this returns. For .cu and .cc files.
//
// The calls of most ops have these functions, which the kernels of each back end define (those that write rows or slices
// are planned by their handlers):
//   Strategies()   the names of all strategies that MakePlan can choose
//   MakePlan()     how Run runs, from shapes and flags alone
//   Run(executor)  writes every element of the results. On CUDA it only enqueues work on the stream: no allocation, no
//                  synchronisation, and the same launches for the same problem
#pragma once

#ifdef JB_CUDA

using cudaStream_t = struct CUstream_st*;

namespace jax_baracuda {

struct CudaStatus;

using Executor = cudaStream_t;
using RunStatus = CudaStatus;

}  // namespace jax_baracuda

#else

namespace xla::ffi {
class ThreadPool;
}  // namespace xla::ffi

namespace jax_baracuda {

using Executor = xla::ffi::ThreadPool&;
using RunStatus = bool;  // false if memory allocation failed

}  // namespace jax_baracuda

#endif
