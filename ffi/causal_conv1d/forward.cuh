// The arguments of the forward kernels of both layouts.
#pragma once

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/conv_device.cuh"

namespace jax_baracuda::causal_conv1d {

template <typename T>
struct ForwardArguments {
  Geometry geometry;
  bool silu;
  Input<T> x;
  Weights<T> weights;
  InitialState<T> initial_state;
  Input<uint8_t> same_sequence;
  T* y;

  explicit ForwardArguments(const ForwardCall& call)
      : geometry(call.problem),
        silu(call.problem.silu),
        x(call.problem, call.x),
        weights{{call.problem, call.weight, call.type}, {call.problem, call.bias, call.type}},
        initial_state{{call.problem, call.initial_state}, call.state_length},
        same_sequence(call.problem, call.same_sequence),
        y(static_cast<T*>(call.y)) {}
};

CudaStatus LaunchForwardChannelsLast(const ForwardCall& call, Tiling tiling, cudaStream_t stream);

}  // namespace jax_baracuda::causal_conv1d
