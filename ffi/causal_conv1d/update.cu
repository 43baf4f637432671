// The step of a decoder: one new input, or a few, after a state that holds the newest inputs.
#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/forward.cuh"

namespace jax_baracuda::causal_conv1d {
namespace {

inline constexpr int kThreads = 128;

template <typename T>
struct UpdateArguments {
  Geometry geometry;
  bool silu;
  Input<T> x, state;
  Weights<T> weights;
  T *y, *new_state;

  explicit UpdateArguments(const UpdateCall& call)
      : geometry(call.problem),
        silu(call.problem.silu),
        x(call.problem, call.x),
        state(call.problem, call.initial_state),
        weights{{call.problem, call.weight, call.type}, {call.problem, call.bias, call.type}},
        y(static_cast<T*>(call.y)),
        new_state(static_cast<T*>(call.new_state)) {}
};

// Of a thread of UpdateOne: 8 bytes, so that the states of a thread are few and those of a warp fill whole sectors.
template <typename T>
inline constexpr int kUpdateChannels = 8 / sizeof(T);

// One new input. A thread takes a vector of channels, whose states and weights lie one after another.
template <typename T, int kWidth, int kState>
__global__ void __launch_bounds__(kThreads) UpdateOne(const __grid_constant__ UpdateArguments<T> a) {
  using C = ComputeType<T>;
  constexpr int kVec = kUpdateChannels<T>, kPast = kWidth - 1;
  const Geometry& geometry = a.geometry;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVec;
  const int64_t example = geometry.by_channels.Quotient(row), channel = row - example * geometry.channels;
  if (example >= geometry.all_examples) return;
  const int64_t x_row = a.x.Example(geometry, example) * geometry.channels + channel;
  const int64_t state_row = a.state.Example(geometry, example) * geometry.channels + channel;

  const Packed<T, kVec> x_word = LoadPacked<kVec>(a.x.data + x_row);
  T x[kVec], state[kVec * kState + 1];  // never empty
  // The states as 8-byte words, or 16-byte ones where these fit.
  constexpr int kPart = kVec * kState % (2 * kVec) == 0 ? 2 * kVec : kVec;
#pragma unroll
  for (int i = 0; i < kVec * kState; i += kPart) {
    const Packed<T, kPart> word = LoadPacked<kPart>(a.state.data + state_row * kState + i);
    memcpy(state + i, &word, sizeof(word));
  }
  memcpy(x, &x_word, sizeof(x_word));
  C weights[kVec * kWidth], y[kVec];
  a.weights.template Load<kVec, kWidth>(geometry, example, channel, weights, y);
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
  for (int i = 0; i < kVec * kState; i += kPart) {
    Packed<T, kPart> word;
    memcpy(&word, new_state + i, sizeof(word));
    StorePacked<T, kPart>(a.new_state + row * kState + i, word);
  }
}

template <typename T>
bool SuitsUpdateOne(const UpdateCall& call) {
  const Problem& problem = call.problem;
  return AreAligned({call.x.data, call.initial_state.data, call.weight.data, call.bias.data, call.y, call.new_state}) &&
         problem.length == 1 && problem.channels % kUpdateChannels<T> == 0 &&
         call.state_length <= problem.width;
}

template <typename T>
cudaError_t LaunchUpdateOne(const UpdateCall& call, cudaStream_t stream) {
  const Problem& problem = call.problem;
  const int64_t vectors = problem.batch * problem.examples * problem.channels / kUpdateChannels<T>;
  return DispatchWidth(problem.width, [&](auto width) {
    const auto kernel = call.state_length == width ? UpdateOne<T, width, width> : UpdateOne<T, width, width - 1>;
    kernel<<<static_cast<unsigned>(CeilDivide(vectors, kThreads)), kThreads, 0, stream>>>(UpdateArguments<T>(call));
    return cudaGetLastError();
  });
}

// A thread takes a whole row and moves its state oldest entry first, so that the state may be its own successor. With
// kWidth 0 it does no more than that.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    UpdateRows(const __grid_constant__ UpdateArguments<T> a, int64_t state_length, bool channels_last) {
  using C = ComputeType<T>;
  const Geometry& geometry = a.geometry;
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t example = geometry.by_channels.Quotient(row), channel = row - example * geometry.channels;
  if (example >= geometry.all_examples) return;
  const int64_t in_example = channels_last ? channel : channel * geometry.length;
  const int64_t stride = channels_last ? geometry.channels : 1, example_size = geometry.channels * geometry.length;
  const T* x = a.x.data + a.x.Example(geometry, example) * example_size + in_example;
  const T* state = a.state.data + (a.state.Example(geometry, example) * geometry.channels + channel) * state_length;
  if constexpr (kWidth > 0) {
    constexpr int kPast = kWidth - 1;
    T* y = a.y + example * example_size + in_example;
    C weights[kWidth], bias, window[kWidth];
    a.weights.template Load<1, kWidth>(geometry, example, channel, weights, &bias);
#pragma unroll
    for (int k = 0; k < kPast; ++k) window[k] = static_cast<C>(state[state_length - kPast + k]);
    for (int64_t t = 0; t < geometry.length; ++t) {
      window[kPast] = static_cast<C>(x[t * stride]);
      C z = bias;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) z = fma(weights[k], window[k], z);
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
cudaError_t LaunchUpdateRows(const UpdateCall& call, cudaStream_t stream) {
  const int64_t rows = call.problem.batch * call.problem.examples * call.problem.channels;
  if (rows == 0) return cudaSuccess;
  UpdateRows<T, kWidth><<<static_cast<unsigned>(CeilDivide(rows, kThreads)), kThreads, 0, stream>>>(
      UpdateArguments<T>(call), call.state_length, call.problem.channels_last);
  return cudaGetLastError();
}

// Of more new inputs than these a row is worth more than one thread.
inline constexpr int64_t kFewInputs = 16;

}  // namespace

cudaError_t LaunchUpdate(const UpdateCall& call, cudaStream_t stream) {
  return DispatchType(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Problem& problem = call.problem;
    if (!problem.HasNoElement() && SuitsUpdateOne<T>(call)) return LaunchUpdateOne<T>(call, stream);
    if (problem.length <= kFewInputs) {
      return DispatchWidth(problem.width, [&](auto width) {
        return LaunchUpdateRows<T, width>(call, stream);
      });
    }
    const cudaError_t error = LaunchForward(call, stream);
    return error != cudaSuccess ? error : LaunchUpdateRows<T, 0>(call, stream);
  });
}

}  // namespace jax_baracuda::causal_conv1d
