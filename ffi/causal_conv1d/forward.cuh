// What the forward kernels of both layouts take.
#pragma once

#include "ffi/causal_conv1d/conv_device.cuh"

namespace jax_baracuda::causal_conv1d {

template <typename T>
struct ForwardArguments {
  Geometry geometry;
  bool silu;
  Input<T> x;
  Weights<T> weights;
  InitialState<T> initial_state;
  Input<uint8_t> taps;
  T* y;

  ForwardArguments(const ForwardCall& call, int64_t state_length)
      : geometry(call.problem),
        silu(call.problem.silu),
        x(call.problem, call.x),
        weights{{call.problem, call.weight, call.type}, {call.problem, call.bias, call.type}},
        initial_state{{call.problem, call.initial_state}, state_length},
        taps(call.problem, Operand{call.taps.data, call.taps.is_shared}),
        y(static_cast<T*>(call.y)) {}
};

// As LaunchForward, with an initial state of which the newest width - 1 of `state_length` entries count.
cudaError_t LaunchForwardFromState(const ForwardCall& call, int64_t state_length, cudaStream_t stream);

cudaError_t LaunchForwardChannelsLast(const ForwardCall& call, int64_t state_length, cudaStream_t stream);

}  // namespace jax_baracuda::causal_conv1d
