// The forward kernel for [.., length, channels].
#include "ffi/causal_conv1d/channels_last.cuh"
#include "ffi/causal_conv1d/forward.cuh"

namespace jax_baracuda::causal_conv1d {
namespace {

inline constexpr int kRowsAhead = 16;  // rows under way
inline constexpr int kLongestRun = 128, kShortestRun = 8;

template <typename T, int kWidth, int kVec, bool kHasTaps>
__global__ void __launch_bounds__(kChannelsLastThreads)
    ForwardChannelsLast(const __grid_constant__ ForwardArguments<T> a, const __grid_constant__ ChannelsLastGrid grid) {
  using C = ComputeType<T>;
  using Ring = TimeRing<T, kVec, kRowsAhead>;
  constexpr int kPast = kWidth - 1, kRows = kRowsOfCircle<kWidth>;
  __shared__ alignas(16) char shared[Ring::kBlockBytes];
  const Geometry& geometry = a.geometry;
  const ChannelsLastPlace at(geometry, grid, kVec);
  if (at.channel >= geometry.channels || at.count <= 0) return;
  const T* x = at.In(a.x, geometry);
  T* y = a.y + at.Index(geometry, at.example);
  const uint8_t* taps = nullptr;
  if (kHasTaps && a.taps.data != nullptr) taps = at.Times(a.taps, geometry);

  const T* ahead = x;
  const Ring ring(shared);
  const auto load = [&](int row) {
    ring.Load(row, ahead, row < at.count);
    CommitCopies();
    ahead += geometry.channels;
  };
#pragma unroll
  for (int row = 0; row < kRowsAhead; ++row) load(row);
  C weight[kVec][kWidth], bias[kVec];
  LoadChannelWeights<kVec, kWidth>(geometry, a.weights, at.example, at.channel, weight, bias);
  C inputs[kWidth][kVec];
  LoadPast<kVec, kPast>(geometry, x, a.initial_state, at, inputs);
  uint32_t next_masks[kRows];
  const auto load_masks = [&](int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) next_masks[i] = taps != nullptr && first + i < at.count ? taps[first + i] : ~0u;
  };
  if (kHasTaps) load_masks(0);
  for (int first = 0; first < at.count; first += kRows) {
    uint32_t masks[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) masks[i] = next_masks[i];
    if (kHasTaps) load_masks(first + kRows);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      WaitForCopies<kRowsAhead - 1>();
      ring.Read(first + i, inputs[(i + kPast) % kWidth]);
      load(first + i + kRowsAhead);
#pragma unroll
      for (int v = 0; v < kVec; ++v) KeepWide(inputs[(i + kPast) % kWidth][v]);
      C out[kVec];
      ConvolveRow<kWidth, kVec, kHasTaps>(weight, bias, inputs, i, masks[i], out);
      if (a.silu) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) out[v] = Silu(out[v]);
      }
      if (first + i < at.count) StoreNarrow<T, kVec>(y, out);
      y += geometry.channels;
    }
  }
}

}  // namespace

cudaError_t LaunchForwardChannelsLast(const ForwardCall& call, cudaStream_t stream) {
  const Problem& problem = call.problem;
  return DispatchType(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ForwardArguments<T> arguments(call);
    const bool is_aligned = IsAligned(call.x.data, kVectorBytes) && IsAligned(call.y, kVectorBytes);
    const ChannelsLastPlan plan(problem, sizeof(T), kLongestRun, kShortestRun);
    const ChannelsLastGrid grid(problem, plan, is_aligned);
    return LaunchChannelsLast<T>(call, grid, arguments, stream, [](auto width, auto channels, auto has_taps) {
      return ForwardChannelsLast<T, width, channels, has_taps>;
    });
  });
}

}  // namespace jax_baracuda::causal_conv1d
