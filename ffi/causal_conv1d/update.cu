// A decoder step: new inputs, usually one, and a state that holds the newest old inputs.
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
  for (int i = 0; i < kVec * kState; i += kWord) {
    Packed<T, kWord> word;
    memcpy(&word, new_state + i, sizeof(word));
    StorePacked<T, kWord>(a.new_state + row * kState + i, word);
  }
}

// Moves the states, one row per thread: oldest entry first, so that new_state may alias the old state.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    MoveStates(const __grid_constant__ UpdateArguments<T> a, bool channels_last) {
  const Geometry& geometry = a.geometry;
  const int64_t state_length = a.initial_state.length;
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t example = geometry.by_channels.Quotient(row), channel = row - example * geometry.channels;
  if (example >= geometry.all_examples) return;
  const int64_t stride = channels_last ? geometry.channels : 1;
  const T* x = a.x.data + a.x.Example(geometry, example) * geometry.channels * geometry.length +
               (channels_last ? channel : channel * geometry.length);
  const T* state = a.initial_state.entries.data +
                   (a.initial_state.entries.Example(geometry, example) * geometry.channels + channel) * state_length;
  T* new_state = a.new_state + row * state_length;
  for (int64_t i = 0; i < state_length; ++i) {
    const int64_t source = i + geometry.length;
    new_state[i] = source < state_length ? state[source] : x[(source - state_length) * stride];
  }
}

}  // namespace

CudaStatus Launch(const UpdateCall& call, const ConvolutionPlan& plan, cudaStream_t stream) {
  if (plan.strategy == Strategy::kNothing) return {};
  const Problem& problem = call.problem;
  const int64_t rows = problem.batch * problem.examples * problem.channels;
  return DispatchType(call.type, [&](auto tag) -> CudaStatus {
    using T = typename decltype(tag)::type;
    if (plan.strategy == Strategy::kOneInput) {
      return DispatchWidth(problem.width, [&](auto width) {
        const auto kernel = call.state_length == width ? UpdateOne<T, width, width> : UpdateOne<T, width, width - 1>;
        kernel<<<GridSize(CeilDivide(rows / kUpdateChannels<T>, kThreads)), kThreads, 0, stream>>>(
            UpdateArguments<T>(call));
        return JB_LAUNCH_STATUS(UpdateOne);
      });
    }
    const ForwardCall& convolution = call;
    JB_RETURN_IF_CUDA_ERROR(Launch(convolution, PlanOf(convolution), stream));
    MoveStates<T><<<GridSize(CeilDivide(rows, kThreads)), kThreads, 0, stream>>>(UpdateArguments<T>(call),
                                                                                 problem.channels_last);
    return JB_LAUNCH_STATUS(MoveStates);
  });
}

}  // namespace jax_baracuda::causal_conv1d
