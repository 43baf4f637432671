// A call of segment_logsumexp, and the scalar arithmetic of its kernels.
#pragma once

#include <cmath>
#include <limits>

#include "ffi/segment/problem.h"

#ifndef __CUDACC__
#include "ffi/core/exp_cpu.h"
#endif

namespace jax_baracuda::segment {

struct LogSumExpCall : SegmentCall {
  const void* data = nullptr;
  void* output = nullptr;  // in the ComputeType of the data

  // How the launcher runs, from shapes and flags alone.
  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

template <typename C>
JB_ALWAYS_INLINE C Exponential(C x) {
#ifdef __CUDACC__
  return std::exp(x);
#else
  return Exp(x);  // vectorises
#endif
}

// What is known of a cell after some of its rows: their maximum, NaN if one of them is NaN, and the sum of
// exp(x - maximum). The sum of no rows is 0, and so is that of rows of -inf.
template <typename C>
struct LogSumExp {
  C maximum, sum;

  JB_ALWAYS_INLINE static LogSumExp OfNoRows() { return {-std::numeric_limits<C>::infinity(), C{0}}; }

  // Folds in other rows of the cell.
  JB_ALWAYS_INLINE void Merge(LogSumExp other) {
    const bool other_is_larger = other.maximum > maximum || other.maximum != other.maximum;
    const C larger = other_is_larger ? other.maximum : maximum, smaller = other_is_larger ? maximum : other.maximum;
    const C sum_of_larger = other_is_larger ? other.sum : sum, sum_of_smaller = other_is_larger ? sum : other.sum;
    const C scale = smaller == -std::numeric_limits<C>::infinity() ? C{0} : Exponential(smaller - larger);
    maximum = larger;
    sum = sum_of_larger + sum_of_smaller * scale;
  }

  // Folds in one row.
  JB_ALWAYS_INLINE void Add(C x) { Merge({x, C{1}}); }

  JB_ALWAYS_INLINE C Value() const {
    // If the maximum is inf, the sum is NaN: it has terms exp(inf - inf).
    return maximum == std::numeric_limits<C>::infinity() ? maximum : maximum + std::log(sum);
  }
};

}  // namespace jax_baracuda::segment
