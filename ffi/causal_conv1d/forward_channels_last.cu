// The forward kernel for [.., length, channels].
#include "ffi/causal_conv1d/channels_last.cuh"

namespace jax_baracuda::causal_conv1d {
namespace {

template <typename T, int kWidth, int kVec, bool kHasMasks>
__global__ void __launch_bounds__(kChannelsLastThreads, Tuning::ForwardChannelsLastBlocks(sizeof(T), kWidth))
    ForwardChannelsLast(const __grid_constant__ ForwardArguments<T> a, const __grid_constant__ ChannelsLastGrid grid) {
  using C = ComputeType<T>;
  constexpr int kPast = kWidth - 1, kRows = kRowsOfCircle<kWidth>;
  using Stages = TimeStages<T, kVec, Tuning::kForwardStageTimes, kRows>;
  __shared__ alignas(kVectorBytes) char shared[Stages::kBlockBytes];
  const Geometry& geometry = a.geometry;
  const ChannelsLastPlace at(geometry, grid, kVec);
  if (at.channel >= geometry.channels || at.count <= 0) return;
  const T* x = at.In(a.x, geometry);
  T* y = a.y + at.Index(geometry, at.example);
  const uint8_t* same_sequence = nullptr;
  if (kHasMasks && a.same_sequence.data != nullptr) same_sequence = at.Times(a.same_sequence, geometry);

  const T* ahead = x;
  const Stages stages(shared);
  const auto load_group = [&](int first) {
    if (first < at.count) {
#pragma unroll
      for (int row = first; row < first + Stages::kGroupTimes; ++row) {
        stages.Load(row, ahead, row < at.count);
        ahead += geometry.channels;
      }
    }
    CommitCopies();
  };
#pragma unroll
  for (int row = 0; row < Stages::kAhead; row += Stages::kGroupTimes) load_group(row);
  C weight[kVec][kWidth], bias[kVec];
  a.weights.template Load<kVec, kWidth>(geometry, at.example, at.channel, weight[0], bias);
  C inputs[kWidth][kVec];
  LoadPast<kVec, kPast>(geometry, x, a.initial_state, at, geometry.template LeftOut<kWidth>(), inputs);
  uint32_t next_masks[kRows];
  const auto load_masks = [&](int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next_masks[i] = same_sequence != nullptr && first + i < at.count ? same_sequence[first + i] : ~0u;
    }
  };
  if (kHasMasks) load_masks(0);
  for (int first = 0; first < at.count; first += kRows) {
    uint32_t masks[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) masks[i] = next_masks[i] & geometry.template TapBits<kWidth>();
    if (kHasMasks) load_masks(first + kRows);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (Stages::BeginsGroup(i)) WaitForCopies<Stages::kGroups - 1>();
      stages.Read(first + i, inputs[(i + kPast) % kWidth]);
      if (Stages::EndsGroup(i)) load_group(first + i + 1 - Stages::kGroupTimes + Stages::kAhead);
#pragma unroll
      for (int v = 0; v < kVec; ++v) KeepWide(inputs[(i + kPast) % kWidth][v]);
      C out[kVec];
      ConvolveRow<kWidth, kVec, kHasMasks>(weight, bias, inputs, i, masks[i], out);
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

CudaStatus LaunchChannelsLast(const ForwardCall& call, const ConvolutionPlan& plan, cudaStream_t stream) {
  return DispatchType(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LaunchOnGrid<T>(
        call, plan, ForwardArguments<T>(call), stream,
        [](auto width, auto channels, auto has_masks) { return ForwardChannelsLast<T, width, channels, has_masks>; });
  });
}

}  // namespace jax_baracuda::causal_conv1d
