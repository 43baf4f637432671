// A decoder step: one or a few new inputs, and a state that holds the newest old inputs.
#include "ffi/causal_conv1d/conv_device.cuh"
#include "ffi/causal_conv1d/tuning.h"

namespace jax_baracuda::causal_conv1d {
namespace {

inline constexpr int kThreads = 128;

template <typename T>
struct UpdateArguments : ForwardArguments<T> {
  T* new_state;

  explicit UpdateArguments(const UpdateCall& call)
      : ForwardArguments<T>(call), new_state(static_cast<T*>(call.new_state)) {}
};

// Channels per thread of UpdateOne.
template <typename T>
inline constexpr int kUpdateChannels = static_cast<int>(Tuning::kUpdateBytes / sizeof(T));

// One new input. A thread processes a vector of channels; their states and weights are contiguous.
template <typename T, int kWidth, int kState>
__global__ void __launch_bounds__(kThreads) UpdateOne(const __grid_constant__ UpdateArguments<T> a) {
  using C = ComputeType<T>;
  constexpr int kVec = kUpdateChannels<T>, kPast = kWidth - 1;
  const Geometry& geometry = a.geometry;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVec;
  const int64_t example = geometry.by_channels.Quotient(row), channel = row - example * geometry.channels;
  if (example >= geometry.all_examples) return;
  const int64_t x_row = a.x.Example(geometry, example) * geometry.channels + channel;
  const int64_t state_row = a.initial_state.entries.Example(geometry, example) * geometry.channels + channel;

  const Packed<T, kVec> x_word = LoadPacked<kVec>(a.x.data + x_row);
  T x[kVec], state[kVec * kState + 1];  // + 1: kState may be 0
  // Loads states as 16-byte words if their size allows, otherwise as 8-byte words.
  constexpr int kWord = kVec * kState % (2 * kVec) == 0 ? 2 * kVec : kVec;
#pragma unroll
  for (int i = 0; i < kVec * kState; i += kWord) {
    const Packed<T, kWord> word = LoadPacked<kWord>(a.initial_state.entries.data + state_row * kState + i);
    memcpy(state + i, &word, sizeof(word));
  }
  memcpy(x, &x_word, sizeof(x_word));
  C weights[kVec * kWidth], y[kVec];
  a.weights.template LoadExact<kVec, kWidth>(geometry, example, channel, weights, y);
  T new_state[kVec * kState + 1];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
#pragma unroll
    for (int k = 0; k < kPast; ++k) {
      y[v] = fma(weights[v * kWidth + k], static_cast<C>(state[v * kState + kState - kPast + k]), y[v]);
    }
    y[v] = fma(weights[v * kWidth + kPast], static_cast<C>(x[v]), y[v]);
    if (a.silu) y[v] = Silu(y[v]);
#pragma unroll
    for (int i = 0; i < kState; ++i) new_state[v * kState + i] = i + 1 < kState ? state[v * kState + i + 1] : x[v];
  }
  StoreNarrow<T, kVec>(a.y + row, y);
#pragma unroll
  for (int i = 0; i < kVec * kState; i += kWord) {
    Packed<T, kWord> word;
    memcpy(&word, new_state + i, sizeof(word));
    StorePacked<T, kWord>(a.new_state + row * kState + i, word);
  }
}

// One row per thread. It moves the state oldest entry first, so that new_state may alias the old state. With kWidth 0
// it only moves the state.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    UpdateRows(const __grid_constant__ UpdateArguments<T> a, bool channels_last) {
  using C = ComputeType<T>;
  const Geometry& geometry = a.geometry;
  const int64_t state_length = a.initial_state.length;
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t example = geometry.by_channels.Quotient(row), channel = row - example * geometry.channels;
  if (example >= geometry.all_examples) return;
  const int64_t in_example = channels_last ? channel : channel * geometry.length;
  const int64_t stride = channels_last ? geometry.channels : 1, example_size = geometry.channels * geometry.length;
  const T* x = a.x.data + a.x.Example(geometry, example) * example_size + in_example;
  const T* state = a.initial_state.entries.data +
                   (a.initial_state.entries.Example(geometry, example) * geometry.channels + channel) * state_length;
  if constexpr (kWidth > 0) {
    constexpr int kPast = kWidth - 1;
    T* y = a.y + example * example_size + in_example;
    C weights[kWidth], bias, window[kWidth];
    a.weights.template Load<1, kWidth>(geometry, example, channel, weights, &bias);
    const int left_out = geometry.template LeftOut<kWidth>();
#pragma unroll
    for (int k = 0; k < kPast; ++k) {
      window[k] = k >= left_out ? static_cast<C>(state[state_length - kPast + k]) : C{0};
    }
    for (int64_t t = 0; t < geometry.length; ++t) {
      window[kPast] = static_cast<C>(x[t * stride]);
      C z = bias;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k >= left_out) z = fma(weights[k], window[k], z);
      }
      y[t * stride] = static_cast<T>(a.silu ? Silu(z) : z);
#pragma unroll
      for (int k = 0; k < kPast; ++k) window[k] = window[k + 1];
    }
  }
  T* new_state = a.new_state + row * state_length;
  for (int64_t i = 0; i < state_length; ++i) {
    const int64_t source = i + geometry.length;
    new_state[i] = source < state_length ? state[source] : x[(source - state_length) * stride];
  }
}

template <typename T, int kWidth>
CudaStatus LaunchUpdateRows(const UpdateCall& call, cudaStream_t stream) {
  const int64_t rows = call.problem.batch * call.problem.examples * call.problem.channels;
  UpdateRows<T, kWidth><<<GridSize(CeilDivide(rows, kThreads)), kThreads, 0, stream>>>(UpdateArguments<T>(call),
                                                                                       call.problem.channels_last);
  return JB_LAUNCH_STATUS(UpdateRows);
}

template <typename T>
CudaStatus LaunchUpdateOne(const UpdateCall& call, cudaStream_t stream) {
  const Problem& problem = call.problem;
  const int64_t vectors = problem.batch * problem.examples * problem.channels / kUpdateChannels<T>;
  return DispatchWidth<kMaxWidth>(problem.width, [&](auto width) {
    const auto kernel = call.state_length == width ? UpdateOne<T, width, width> : UpdateOne<T, width, width - 1>;
    kernel<<<GridSize(CeilDivide(vectors, kThreads)), kThreads, 0, stream>>>(UpdateArguments<T>(call));
    return JB_LAUNCH_STATUS(UpdateOne);
  });
}

}  // namespace

CudaStatus UpdateCall::Run(cudaStream_t stream) const {
  const ConvolutionPlan plan = PlanOf(*this);
  if (plan.strategy == Strategy::kNothing) return {};
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) -> CudaStatus {
    using T = typename decltype(tag)::type;
    if (plan.strategy == Strategy::kOneInput) return LaunchUpdateOne<T>(*this, stream);
    if (plan.strategy == Strategy::kFewInputs) {
      return DispatchKernel(problem.width, /*has_masks=*/false,
                            [&](auto width, auto) { return LaunchUpdateRows<T, width>(*this, stream); });
    }
    JB_RETURN_IF_CUDA_ERROR(ForwardCall{*this}.Run(stream));
    return LaunchUpdateRows<T, 0>(*this, stream);
  });
}

}  // namespace jax_baracuda::causal_conv1d
