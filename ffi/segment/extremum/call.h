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
  int32_t* order = nullptr;   // likewise: a permutation of each element's rows that brings segments together
  int64_t order_size = 0;     // rows, or 1 where no order is wanted
};

struct ExtremumBackwardCall : SegmentCall {
  const void* d_output = nullptr;
  const int32_t* winner = nullptr;
  const int32_t* order = nullptr;  // of the rows, which is faster if it visits segments together; nullptr for none
  bool has_order = false;
  bool shares_ties = false;
  const void* data = nullptr;    // nullptr unless ties are shared
  const void* output = nullptr;  // likewise
  void* d_data = nullptr;
  bool d_output_is_shared = false;
  bool winner_is_shared = false;  // output likewise
  bool order_is_shared = false;
};

struct ArgCall : SegmentCall {
  bool is_minimum = false;
  const void* data = nullptr;
  int32_t* row = nullptr;
};

}  // namespace jax_baracuda::segment
