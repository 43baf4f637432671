// The arguments of the backward kernels of both layouts, and the partial sums of the weight and bias gradients.
#pragma once

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/conv_device.cuh"

namespace jax_baracuda::causal_conv1d {

template <typename T>
struct BackwardArguments {
  Geometry geometry;
  bool silu;
  Input<T> x, dy;
  Weights<T> weights;
  InitialState<T> initial_state, d_final_state;
  Input<uint8_t> same_sequence;
  T* dx;
  ComputeType<T>* partials;  // [batch, partial sums per channel, width + 1, channels]; the bias follows the weights

  explicit BackwardArguments(const BackwardCall& call)
      : geometry(call.problem),
        silu(call.problem.silu),
        x(call.problem, call.x),
        dy(call.problem, call.dy),
        weights{{call.problem, call.weight, call.type}, {call.problem, call.bias, call.type}},
        initial_state{{call.problem, call.initial_state}, call.state_length},
        d_final_state{{call.problem, call.d_final_state}, call.problem.width - 1},
        same_sequence(call.problem, call.same_sequence),
        dx(static_cast<T*>(call.dx)),
        partials(static_cast<ComputeType<T>*>(call.scratch)) {}

  // The address of a channel's first value in a partial sum. Its width + 1 values are `channels` elements apart.
  __device__ __forceinline__ ComputeType<T>* Partial(int64_t example, int64_t part, int64_t parts_of_example, int width,
                                                     int64_t channel) const {
    return partials + (example * parts_of_example + part) * (width + 1) * geometry.channels + channel;
  }
};

// The number of partial sums per channel and example.
int64_t PartsOfExampleChannelsLast(const Problem& problem, int64_t element_bytes);

CudaStatus LaunchBackwardChannelsLast(const BackwardCall& call, Tiling tiling, cudaStream_t stream);

}  // namespace jax_baracuda::causal_conv1d
