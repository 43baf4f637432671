// Functions that CPU code and CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define JB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JB_HOST_DEVICE inline
#endif
