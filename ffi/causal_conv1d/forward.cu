// The forward kernel for rows along the length ([.., channels, length]).
#include "ffi/causal_conv1d/rows.cuh"
#include "ffi/causal_conv1d/tuning.h"

namespace jax_baracuda::causal_conv1d {
namespace {

// The prefetch distance in steps. The stages also hold the current step and the one before it.
inline constexpr int kPrefetchSteps = Tuning::kPrefetchSteps, kStages = 8;
static_assert(kStages >= kPrefetchSteps + 2);

template <int kWidth, bool kHasMasks, int kVec, typename C>
__device__ __forceinline__ void Convolve(const C* window, const C* weights, C bias, const Masks<kVec>& masks, bool silu,
                                         C* y) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    y[i] = bias;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (!kHasMasks || k == kWidth - 1 || masks.Has(i, kWidth - 1 - k)) y[i] = fma(weights[k], window[i + k], y[i]);
    }
  }
  if (silu) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = Silu(y[i]);
  }
}

template <typename T, int kWidth, bool kHasMasks>
__global__ void __launch_bounds__(kRowsThreads, Tuning::ForwardRowsBlocks(sizeof(T), kWidth, kHasMasks))
    ForwardRows(const __grid_constant__ ForwardArguments<T> a, const __grid_constant__ RowsGrid grid) {
  using C = ComputeType<T>;
  using Stages = VectorStages<T>;
  constexpr int kVec = Stages::kVec, kPast = kWidth - 1, kVectorsBefore = CeilDivide(kPast, kVec);
  __shared__ alignas(kVectorBytes) char shared[Stages::template kBlockBytes<kStages>];
  const Geometry& geometry = a.geometry;
  const RowsPlace<T> at(geometry, grid, kPast, a.initial_state.entries.data != nullptr);
  const Stages stages = Stages::template Make<kStages>(grid.plan);
  const int steps = grid.plan.steps, lanes = grid.plan.lanes, lane = threadIdx.x & (lanes - 1);
  const T* x = at.In(a.x, geometry);
  T* y = a.y + at.index;
  const uint8_t* masks_of_row = nullptr;
  if (kHasMasks && (!kIsWide<kWidth> || a.same_sequence.data != nullptr)) {
    masks_of_row = a.same_sequence.data + a.same_sequence.Example(geometry, at.example) * geometry.length + at.begin;
  }

  const unsigned step_bytes = lanes * kVectorBytes;
  unsigned position = lane * kVectorBytes;  // byte position in the stages
  const auto load = [&](unsigned to, const T* vector, bool is_readable) {
    CopyAsync<kVectorBytes>(shared + stages.Index(to), vector, is_readable);
  };
  const int last_load = min(at.last_readable, (steps - 1) * at.step);
  if (lane >= lanes - kVectorsBefore) load(position - step_bytes, x - at.step, at.IsReadable(-at.step));
#pragma unroll
  for (int i = 0; i < kPrefetchSteps; ++i) {
    load(position + i * step_bytes, x + i * at.step, i * at.step <= last_load);
    CommitCopies();
  }
  C weights[kWidth], bias;
  a.weights.template Load<1, kWidth>(geometry, at.example, at.channel, weights, &bias);
  const T* x_prefetch = x + kPrefetchSteps * at.step;
  T* y_vector = y;
  const T* state_end = a.initial_state.End(geometry, at.example, at.channel);
  const MasksOfRow<kVec> row_masks{masks_of_row, at.before, at.after};
  uint32_t borders = 0;
  if constexpr (kHasMasks && !kIsWide<kWidth>) borders = StepsWithBorders(at, grid.plan, masks_of_row, kWidth, 0);
  for (int step = 0, offset = 0; step < steps; ++step, offset += at.step) {
    WaitForCopies<kPrefetchSteps - 1>();
    __syncwarp();
    load(position + kPrefetchSteps * step_bytes, x_prefetch, offset <= last_load - kPrefetchSteps * at.step);
    CommitCopies();
    C window[kPast + kVec], out[kVec];
    stages.template Read<kPast>(shared, position, window);
    const bool is_regular = at.IsRegular(offset);
    if (!is_regular) {
      MendWindow<kPast>(at, offset, x + offset, state_end, kPast - geometry.template LeftOut<kWidth>(), window);
    }
    Masks<kVec> masks{};
    if (kIsWide<kWidth> || (kHasMasks && (borders >> step & 1u) != 0)) {
      row_masks.template Load<kWidth>(geometry, offset, &masks);
      Convolve<kWidth, true, kVec>(window, weights, bias, masks, a.silu, out);
    } else {
      Convolve<kWidth, false, kVec>(window, weights, bias, masks, a.silu, out);
    }
    if (is_regular) {
      StoreNarrow<T, kVec>(y_vector, out);
    } else if (at.is_real) {
      StoreInRow(at, offset, y_vector, out);
    }
    position += step_bytes;
    x_prefetch += at.step;
    y_vector += at.step;
  }
}

}  // namespace

CudaStatus ForwardCall::Run(cudaStream_t stream) const {
  const ConvolutionPlan plan = PlanOf(*this);
  if (plan.strategy == Strategy::kNothing) return {};
  if (problem.channels_last) return LaunchChannelsLast(*this, plan, stream);
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const RowsGrid grid(plan);
    return DispatchKernel(problem.width, problem.has_same_sequence, [&](auto width, auto has_masks) {
      const auto kernel = ForwardRows<T, width, has_masks>;
      kernel<<<grid.Blocks(), kRowsThreads, 0, stream>>>(ForwardArguments<T>(*this), grid);
      return JB_LAUNCH_STATUS(ForwardRows);
    });
  });
}

}  // namespace jax_baracuda::causal_conv1d
