// The last step of a reduction: adds up the partial sums of several blocks.
#pragma once

#include <cstdint>

namespace jax_baracuda {

// Adds up `count` partial sums, `stride` apart: always in the same order, and in double, since there may be very many.
// `lanes` threads (a power of two) cooperate: lane i adds partials i, i + lanes, ...; a tree over the lanes then leaves
// the sum in lane 0. All threads of the block must call this. `own` is the thread's own element of shared memory;
// those of neighbouring lanes are `own_stride` apart.
template <typename C>
__device__ __forceinline__ double SumPartials(const C* partials, int64_t count, int64_t stride, int lane, int lanes,
                                              double* own, int own_stride) {
  double sum = 0;
#pragma unroll 8
  for (int64_t i = lane; i < count; i += lanes) sum += partials[i * stride];
  *own = sum;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) *own += own[half * own_stride];
  }
  return *own;
}

}  // namespace jax_baracuda
