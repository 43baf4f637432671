// A call of segment_logsumexp, and the scalar arithmetic of its kernels.
#pragma once

#include <cmath>
#include <limits>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct LogSumExpCall : SegmentCall {
  const void* data = nullptr;
  void *maxima = nullptr, *totals = nullptr;  // the states of cells, in the ComputeType of the data

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// The state of a cell after some of its rows: their maximum, NaN if one of them is NaN, and the total of
// exp(x - maximum). The total of no rows is 0, and so is that of rows of -inf.
template <typename C>
struct LogSumExp {
  C maximum, total;

  JB_ALWAYS_INLINE static LogSumExp OfNoRows() { return {-std::numeric_limits<C>::infinity(), C{0}}; }

  // Folds in other rows of the cell.
  JB_ALWAYS_INLINE void Merge(LogSumExp other) {
    const bool other_is_larger = other.maximum > maximum || other.maximum != other.maximum;
    const C larger = other_is_larger ? other.maximum : maximum, smaller = other_is_larger ? maximum : other.maximum;
    const C of_larger = other_is_larger ? other.total : total, of_smaller = other_is_larger ? total : other.total;
    const C scale = smaller == -std::numeric_limits<C>::infinity() ? C{0} : std::exp(smaller - larger);
    maximum = larger;
    total = of_larger + of_smaller * scale;
  }

  // Folds in one row.
  JB_ALWAYS_INLINE void Add(C x) { Merge({x, C{1}}); }

  // The total of all rows. It is NaN if the maximum is inf or NaN, as exp(x - maximum) is for the row that attains it.
  JB_ALWAYS_INLINE C Total() const {
    return maximum < std::numeric_limits<C>::infinity() ? total : std::numeric_limits<C>::quiet_NaN();
  }
};

}  // namespace jax_baracuda::segment
