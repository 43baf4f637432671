// Calls of segment_max, segment_min, segment_argmax, segment_argmin and their gradients.
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

struct ExtremumCall : SegmentCall {
  bool is_minimum = false;
  bool with_winner = false;
  bool first_wins = false;
  const void* data = nullptr;
  void* output = nullptr;
  int32_t* winner = nullptr;  // with_winner: [batch, segments, features]

  static std::vector<const char*> Strategies(bool with_winner);
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

struct ExtremumBackwardCall : SegmentCall {
  BatchOperand d_output;
  BatchOperand winner;  // int32
  BatchOperand data;    // if ties are shared
  BatchOperand output;  // likewise
  void* d_data = nullptr;

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// The first row that attains each cell's maximum; the number of rows for an empty segment.
struct ArgCall : SegmentCall {
  bool is_minimum = false;
  const void* data = nullptr;
  int32_t* row = nullptr;

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
