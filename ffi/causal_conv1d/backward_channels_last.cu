// The backward kernel for [.., length, channels].
#include "ffi/causal_conv1d/channels_last.cuh"

namespace jax_baracuda::causal_conv1d {
namespace {

// 16-byte vectors commit a group of copies for each time, which costs little per byte. Narrower vectors commit several
// times as one group.
template <typename T, int kWidth, int kVec>
using BackwardStages = std::conditional_t<(sizeof(T) * kVec < kVectorBytes),
                                          TimeStages<T, kVec, Tuning::kBackwardNarrowStageTimes, kRowsOfCircle<kWidth>>,
                                          TimeStages<T, kVec, Tuning::kBackwardStageTimes, 1>>;

template <typename T, int kWidth, int kVec, bool kHasMasks>
__global__ void __launch_bounds__(kChannelsLastThreads, Tuning::BackwardChannelsLastBlocks(sizeof(T), kWidth))
    BackwardChannelsLast(const __grid_constant__ BackwardArguments<T> a,
                         const __grid_constant__ ChannelsLastGrid grid) {
  using C = ComputeType<T>;
  constexpr int kPast = kWidth - 1, kRows = kRowsOfCircle<kWidth>;
  using Stages = BackwardStages<T, kWidth, kVec>;
  constexpr int kSumBytes = kChannelsLastThreads * kVec * (kWidth + 1) * static_cast<int>(sizeof(C));
  // Shared memory holds the stages first, and the sums later.
  constexpr int kStagesBytes = 2 * Stages::kBlockBytes;
  __shared__ alignas(kVectorBytes) char shared[kSumBytes > kStagesBytes ? kSumBytes : kStagesBytes];
  const Geometry& geometry = a.geometry;
  const ChannelsLastPlace at(geometry, grid, kVec);
  C sums[kWidth + 1][kVec] = {};
  if (at.channel < geometry.channels && at.count > 0) {
    const T *x = at.In(a.x, geometry), *d_output = at.In(a.d_output, geometry);
    T* dx = a.dx + at.Index(geometry, at.example) - kPast * geometry.channels;  // kPast rows before the row of x
    const uint8_t* same_sequence = nullptr;
    if (kHasMasks && a.same_sequence.data != nullptr) same_sequence = at.Times(a.same_sequence, geometry);
    // The gradients of this run's inputs need dz of up to kPast times after the run.
    const int walk = at.count + kPast, end = static_cast<int>(min(geometry.length - at.begin, int64_t{walk}));

    const T *x_prefetch = x, *d_output_prefetch = d_output;
    const Stages x_stages(shared), d_output_stages(shared + Stages::kBlockBytes);
    const auto load_group = [&](int first) {
#pragma unroll
      for (int row = first; row < first + Stages::kGroupTimes; ++row) {
        x_stages.Load(row, x_prefetch, row < end);
        d_output_stages.Load(row, d_output_prefetch, row < end);
        x_prefetch += geometry.channels;
        d_output_prefetch += geometry.channels;
      }
      CommitCopies();
    };
#pragma unroll
    for (int row = 0; row < Stages::kAhead; row += Stages::kGroupTimes) load_group(row);
    C weight[kVec][kWidth], bias[kVec];
    a.weights.template Load<kVec, kWidth>(geometry, at.example, at.channel, weight[0], bias);
    C inputs[kWidth][kVec];
    C gradients[kWidth][kVec] = {};  // the gradients of these inputs
    LoadPast<kVec, kPast>(geometry, x, a.initial_state, at, geometry.template LeftOut<kWidth>(), inputs);
    uint32_t next_masks[kRows];
    const auto load_masks = [&](int first) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        next_masks[i] = same_sequence == nullptr ? ~0u : first + i < end ? same_sequence[first + i] : 0u;
      }
    };
    if (kHasMasks) load_masks(0);
    for (int first = 0; first < walk; first += kRows) {
      uint32_t masks[kRows];
      uint32_t common = ~0u;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        masks[i] = next_masks[i] & geometry.template TapBits<kWidth>();
        common &= masks[i];
      }
      if (kHasMasks) load_masks(first + kRows);
      const auto compute = [&](auto is_masked) {
        constexpr bool kIsMasked = decltype(is_masked)::value;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int row = first + i;
          C dz[kVec];
          if (Stages::BeginsGroup(i)) WaitForCopies<Stages::kGroups - 1>();
          x_stages.Read(row, inputs[(i + kPast) % kWidth]);
          d_output_stages.Read(row, dz);
          if (Stages::EndsGroup(i)) load_group(row + 1 - Stages::kGroupTimes + Stages::kAhead);
#pragma unroll
          for (int v = 0; v < kVec; ++v) KeepWide(inputs[(i + kPast) % kWidth][v]);
          if (a.silu) {
            C z[kVec];
            ConvolveRow<kWidth, kVec, kIsMasked>(weight, bias, inputs, i, masks[i], z);
#pragma unroll
            for (int v = 0; v < kVec; ++v) dz[v] = SiluBackward(z[v], dz[v]);
          }
#pragma unroll
          for (int v = 0; v < kVec; ++v) gradients[(i + kPast) % kWidth][v] = 0;
          const bool is_own = row < at.count;
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            if (!kIsMasked || (masks[i] >> (kPast - k) & 1u)) {
#pragma unroll
              for (int v = 0; v < kVec; ++v) {
                gradients[(i + k) % kWidth][v] = fma(weight[v][k], dz[v], gradients[(i + k) % kWidth][v]);
                if (is_own) sums[k][v] = fma(dz[v], inputs[(i + k) % kWidth][v], sums[k][v]);
              }
            }
          }
          if (is_own) {
#pragma unroll
            for (int v = 0; v < kVec; ++v) sums[kWidth][v] += dz[v];
          }
          // The gradients of row - kPast are complete now.
          if (static_cast<unsigned>(row - kPast) < static_cast<unsigned>(at.count)) {
            StoreNarrow<T, kVec>(dx, gradients[i % kWidth]);
          }
          dx += geometry.channels;
        }
      };
      constexpr uint32_t kAllBits = (1u << kWidth) - 1;
      if (kIsWide<kWidth> || (kHasMasks && (common & kAllBits) != kAllBits)) {
        compute(std::true_type{});
      } else {
        compute(std::false_type{});
      }
    }
  }
  WaitForCopies<0>();  // copies past the end still write zeros to shared memory, which the sums reuse
  __syncthreads();
  // Adds up the runs of the block, in a fixed order.
  C* shared_sums = reinterpret_cast<C*>(shared);
  const int lane = threadIdx.x, lanes = grid.plan.lanes;
#pragma unroll
  for (int k = 0; k <= kWidth; ++k) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      shared_sums[((threadIdx.y * (kWidth + 1) + k) * lanes + lane) * kVec + v] = sums[k][v];
    }
  }
  __syncthreads();
  const int columns = lanes * kVec, cells = columns * (kWidth + 1);
  const int64_t first_channel = at.channel - lane * kVec;
  const int left_out = geometry.template LeftOut<kWidth>();
  C* partial = a.Partial(at.example, at.block_down, grid.plan.blocks_down, kWidth - left_out, first_channel);
  for (int cell = threadIdx.y * lanes + lane; cell < cells; cell += kChannelsLastThreads) {
    const int k = cell / columns, column = cell - k * columns;
    if (first_channel + column >= geometry.channels || k < left_out) continue;
    C sum = 0;
    for (int run = 0; run < grid.plan.runs; ++run) sum += shared_sums[run * cells + cell];
    partial[(k - left_out) * geometry.channels + column] = sum;
  }
}

}  // namespace

CudaStatus LaunchChannelsLast(const BackwardCall& call, const ConvolutionPlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LaunchOnGrid<T>(
        call, plan, BackwardArguments<T>(call), stream,
        [](auto width, auto channels, auto has_masks) { return BackwardChannelsLast<T, width, channels, has_masks>; });
  });
}

}  // namespace jax_baracuda::causal_conv1d
