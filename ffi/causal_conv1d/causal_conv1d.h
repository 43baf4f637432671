// Shared by the CPU and CUDA kernels of causal_conv1d: the problem and the operands of a call.
//
//   z[b,c,t] = sum over k < width of weight[c,k] * x[b,c,t-(width-1-k)] + bias[c],   y = silu(z) or z
//
// where x before t = 0 is the initial state, or zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ffi/core/element_type.h"

namespace jax_baracuda::causal_conv1d {

inline constexpr int kMaxWidth = 8;
// Each width up to this one has its own kernels. Larger widths are rare and share kernels with a run-time width.
inline constexpr int kMaxConstantWidth = 4;

// x, dy, y, dx: [batch, examples, channels, length], or [batch, examples, length, channels] with channels_last.
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

// data is nullptr if an optional operand is absent.
struct Operand {
  const void* data = nullptr;
  bool is_shared = false;
};

// Weights and biases have x's type; with 16-bit x they may be float32.
struct Parameter : Operand {
  ElementType type = ElementType::kUnsupported;
};

// Common to the calls of all ops.
struct ConvolutionCall {
  Problem problem;
  ElementType type;  // a floating type: of x, of the results of x's shape, and of states
  Operand x;
  Parameter weight;
  Parameter bias;            // optional
  Operand initial_state;     // optional: inputs of each channel before time 0, the newest last
  int64_t state_length = 0;  // inputs per channel, at least width - 1; only the newest width - 1 matter
  Operand same_sequence;     // optional, uint8_t masks: bit j is set if the input j steps back is in the same sequence
};

struct ForwardCall : ConvolutionCall {
  void* y;
};

struct BackwardCall : ConvolutionCall {
  Operand dy;
  Operand d_final_state;  // optional: the cotangent of the last width - 1 inputs
  void* dx;
  void* dweight;                    // [batch, channels, width] of the compute type
  void* dbias;                      // [batch, channels] of the compute type
  void* d_initial_state = nullptr;  // nullptr without an initial state
  void* scratch;
};

// problem.length is the number of new inputs; initial_state is the old state.
struct UpdateCall : ForwardCall {
  void* new_state;  // may alias the old state
};

// Calls body(std::integral_constant<int, width>{}) for a width of 1 to kMaxConstantWidth, and returns what it returns.
template <int kWidth = 1, typename Body>
auto DispatchWidth(int width, const Body& body) {
  if constexpr (kWidth < kMaxConstantWidth) {
    if (width != kWidth) return DispatchWidth<kWidth + 1>(width, body);
  }
  return body(std::integral_constant<int, kWidth>{});
}

}  // namespace jax_baracuda::causal_conv1d
