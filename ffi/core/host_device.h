// Functions that CPU code and CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define JB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JB_HOST_DEVICE inline
#endif

// As JB_HOST_DEVICE, but also inlined into functions compiled for several instruction sets.
#ifdef __CUDACC__
#define JB_ALWAYS_INLINE JB_HOST_DEVICE
#else
#define JB_ALWAYS_INLINE __attribute__((always_inline)) inline
#endif
