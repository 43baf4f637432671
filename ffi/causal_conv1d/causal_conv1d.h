// Shared by the CPU and CUDA kernels of causal_conv1d: the problem and the operands of a call.
//
//   z[b,c,t] = sum over k < width of weight[c,k] * x[b,c,t-(width-1-k)] + bias[c],   y = silu(z) or z
//
// where x before t = 0 is the initial state, or zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "ffi/core/batch_operand.h"
#include "ffi/core/copy.h"
#include "ffi/core/element_type.h"
#include "ffi/core/executor.h"
#include "ffi/core/plan.h"

namespace jax_baracuda::causal_conv1d {

inline constexpr int kMaxWidth = 8;
// Each width up to this one has its own kernels. Larger widths are rare and share kernels with a run-time width, except
// for updates by one input.
inline constexpr int kMaxConstantWidth = 4;

// x, d_output, y, dx: [batch, examples, channels, length], or [batch, examples, length, channels] with channels_last.
// weight: [batch, channels, width]; bias: [batch, channels]; states: [batch, examples, channels, state length];
// same_sequence: [batch, examples, length]. An operand whose leading dimension is 1 is shared by the whole batch.
struct Problem {
  int64_t batch;
  int64_t examples;
  int64_t channels;
  int64_t length;
  int width;  // 1 to kMaxWidth
  bool channels_last;
  bool silu;
  bool has_same_sequence;

  bool HasNoElement() const { return batch == 0 || examples == 0 || channels == 0 || length == 0; }
};

// Weights and biases have x's type; with 16-bit x they may be float32.
struct Parameter : BatchOperand {
  ElementType type = ElementType::kUnsupported;
};

// Common to the calls of all ops.
struct ConvolutionCall {
  Problem problem;
  ElementType type;  // a floating type: of x, of the results of x's shape, and of states
  BatchOperand x;
  Parameter weight;
  Parameter bias;              // optional
  BatchOperand initial_state;  // optional: inputs of each channel before time 0, the newest last
  int64_t state_length = 0;    // inputs per channel, at least width - 1; only the newest width - 1 matter
  BatchOperand
      same_sequence;  // optional, uint8_t masks: bit j is set if the input j steps back is in the same sequence
};

// Common to the calls that write y.
struct OutputCall : ConvolutionCall {
  void* y;
};

struct ForwardCall : OutputCall {
  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

struct BackwardCall : ConvolutionCall {
  BatchOperand d_output;
  BatchOperand d_final_state;  // optional: the cotangent of the last width - 1 inputs
  void* dx;
  void* dweight;                    // [batch, channels, width] of the compute type
  void* dbias;                      // [batch, channels] of the compute type
  void* d_initial_state = nullptr;  // nullptr without an initial state
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// problem.length is the number of new inputs; initial_state is the old state.
struct UpdateCall : OutputCall {
  void* new_state;  // may alias the old state

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// States of sequences, [batch, slots, channels, length]: read, then written in place. A state begins at some entry of its
// row and has width - 1 inputs, the newest last. All sequences read their states before any is written. Of several
// sequences with the same slot, the last one writes it.
struct StatePool {
  void* data = nullptr;
  Copy of_old_states;  // made first
  int64_t slots = 0;
  int64_t length = 0;     // at least width - 1
  int64_t sequences = 0;  // of a batch element
  BatchOperand
      slots_of_sequences;  // int32_t [batch, sequences]; a sequence with a slot outside of the pool has no state
};

// x and y are [batch, 1, length, channels]. Sequence i has the times from its start to that of sequence i + 1. Other
// times are padding, where y is zero. Empty sequences leave the pool as it is. Starts may be anything: if they descend,
// results are unspecified.
struct RaggedCall : OutputCall {
  StatePool pool;
  BatchOperand starts;     // int32_t [batch, sequences + 1]
  BatchOperand has_state;  // bool [batch, sequences]: whether the sequence begins with its state, otherwise with zeros

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// Every example is a sequence with a slot.
struct PoolUpdateCall : OutputCall {
  StatePool pool;
  // Optional, int32_t [batch, examples]: how many inputs of the previous call count. Its state begins at this entry minus
  // one of its row. Clamped to what fits.
  BatchOperand num_accepted;

  // The number of inputs that the new state of a row holds, from its first entry on. With num_accepted, these are all
  // from which the next state may be chosen.
  int64_t num_written() const {
    if (problem.width == 1) return 0;
    return num_accepted.data == nullptr ? problem.width - 1 : problem.width - 2 + problem.length;
  }

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// Calls body(std::integral_constant<int, width>{}) for a width of 1 to kMost, and returns what it returns.
template <int kMost = kMaxConstantWidth, int kWidth = 1, typename Body>
auto DispatchWidth(int width, const Body& body) {
  if constexpr (kWidth < kMost) {
    if (width != kWidth) return DispatchWidth<kMost, kWidth + 1>(width, body);
  }
  return body(std::integral_constant<int, kWidth>{});
}

}  // namespace jax_baracuda::causal_conv1d
