// What the CPU and the CUDA kernels of causal_conv1d share: the problem, the operands of a call, and the activation.
//
//   z[b,c,t] = sum over k < width of weight[c,k] * x[b,c,t-(width-1-k)] + bias[c],   y = silu(z) or z
//
// where x before t = 0 is the initial state, or zero.
#pragma once

#include <cmath>
#include <cstdint>

#include "ffi/core/element_type.h"

namespace jax_baracuda::causal_conv1d {

inline constexpr int kMostWidth = 8;

// x, dy, y, dx: [batch, examples, channels, length], or [batch, examples, length, channels] where channels are last.
// weight: [batch, channels, width]; bias: [batch, channels]; states: [batch, examples, channels, state length];
// taps: [batch, examples, length]. An operand whose leading dimension is 1 is shared by the whole batch.
struct Problem {
  int64_t batch;
  int64_t examples;
  int64_t channels;
  int64_t length;
  int width;  // 1 to kMostWidth
  bool channels_last;
  bool silu;

  bool HasNoElement() const { return batch == 0 || examples == 0 || channels == 0 || length == 0; }
};

// data is nullptr where an optional operand is absent.
struct Operand {
  const void* data = nullptr;
  bool is_shared = false;
};

// Weights and biases have the type of x, or float32 where x has 16 bits.
struct Parameter {
  const void* data = nullptr;
  bool is_shared = false;
  ElementType type = ElementType::kUnsupported;
};

struct ForwardCall {
  Problem problem;
  ElementType type;  // of x, y and the initial state: a floating type
  Operand x;
  Parameter weight;
  Parameter bias;         // optional
  Operand initial_state;  // optional; width - 1 inputs of each channel, the newest last
  Operand taps;           // optional, uint8_t: bit j is set if the input j steps back belongs to the same sequence
  void* y;
};

struct BackwardCall {
  Problem problem;
  ElementType type;
  Operand x;
  Parameter weight;
  Operand dy;
  Parameter bias;
  Operand initial_state;
  Operand taps;
  Operand d_final_state;  // optional: the cotangent of the last width - 1 inputs
  void* dx;
  void* dweight;          // [batch, channels, width] of the compute type
  void* dbias;            // [batch, channels] of the compute type
  void* d_initial_state;  // nullptr where there is no initial state
  void* scratch;
  int64_t scratch_bytes;
};

struct UpdateCall {
  Problem problem;  // length is the number of new inputs
  ElementType type;
  int64_t state_length;  // at least width - 1
  Operand x;
  Operand state;
  Parameter weight;
  Parameter bias;
  void* y;
  void* new_state;  // may be the state's own memory
};

}  // namespace jax_baracuda::causal_conv1d
