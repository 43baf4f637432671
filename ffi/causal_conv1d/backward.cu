// The backward kernel for rows along the length ([.., channels, length]), and the final kernels of both layouts.
#include <algorithm>

#include "ffi/causal_conv1d/rows.cuh"
#include "ffi/causal_conv1d/tuning.h"
#include "ffi/core/partial_sums.cuh"

namespace jax_baracuda::causal_conv1d {
namespace {

// The prefetch distance in steps, including the current step, and the number of stages.
inline constexpr int kPrefetchSteps = Tuning::kPrefetchSteps, kStages = 8;
static_assert(kStages >= kPrefetchSteps + 1);

// Computes dz, the gradients of a vector's pre-activations.
template <int kWidth, bool kHasMasks, int kVec, typename C, typename TapBits>
__device__ __forceinline__ void PreActivationGradient(const C* x, const C* d_output, const C* weights, C bias,
                                                      const TapBits& masks, bool silu, C* dz) {
  if (silu) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      C z = bias;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (!kHasMasks || k == kWidth - 1 || masks.Has(i, kWidth - 1 - k)) z = fma(weights[k], x[i + k], z);
      }
      dz[i] = SiluBackward(z, d_output[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) dz[i] = d_output[i];
  }
}

// A group walks its tile from end to beginning. dx at a time needs dz of up to width - 1 later times, which are in
// other threads' registers from this step or the previous one.
template <typename T, int kWidth, bool kHasMasks>
__global__ void __launch_bounds__(kRowsThreads, Tuning::BackwardRowsBlocks(sizeof(T), kWidth, kHasMasks))
    BackwardRows(const __grid_constant__ BackwardArguments<T> a, const __grid_constant__ RowsGrid grid) {
  using C = ComputeType<T>;
  using Stages = VectorStages<T>;
  constexpr int kVec = Stages::kVec, kPast = kWidth - 1, kVectorsBefore = CeilDivide(kPast, kVec);
  constexpr int kStagesBytes = Stages::template kBlockBytes<kStages>;
  __shared__ alignas(kVectorBytes) char shared[2 * kStagesBytes];
  char *const x_stages = shared, *const d_output_stages = shared + kStagesBytes;
  const Geometry& geometry = a.geometry;
  const RowsPlace<T> at(geometry, grid, kPast, a.initial_state.entries.data != nullptr);
  const Stages stages = Stages::template Make<kStages>(grid.plan);
  const int lanes = grid.plan.lanes, lane = threadIdx.x & (lanes - 1), steps = grid.plan.steps;
  const T *x_row = at.In(a.x, geometry), *d_output_row = at.In(a.d_output, geometry);
  T* dx_row = a.dx + at.index;
  const uint8_t* masks_of_row = nullptr;
  if (kHasMasks && (!kIsWide<kWidth> || a.same_sequence.data != nullptr)) {
    masks_of_row = a.same_sequence.data + a.same_sequence.Example(geometry, at.example) * geometry.length + at.begin;
  }
  const int left_out = geometry.template LeftOut<kWidth>();

  const unsigned step_bytes = lanes * kVectorBytes;
  int offset = (steps - 1) * at.step;
  unsigned position = (steps - 1) * step_bytes + lane * kVectorBytes;                // byte position in the stages
  const T *x_prefetch = x_row + offset, *d_output_prefetch = d_output_row + offset;  // the next vectors to prefetch
  // Before the tile, only the last kVectorsBefore vectors of x are needed.
  const int first_x = lane >= lanes - kVectorsBefore ? max(at.first_readable, -at.step) : 0;
  const auto prefetch = [&](int steps_ahead) {
    const int ahead = offset - steps_ahead * at.step;
    const unsigned to = stages.Index(position - steps_ahead * step_bytes);
    CopyAsync<kVectorBytes>(x_stages + to, x_prefetch, ahead >= first_x && ahead <= at.last_readable);
    CopyAsync<kVectorBytes>(d_output_stages + to, d_output_prefetch, ahead >= 0 && ahead <= at.last_readable);
    CommitCopies();
    x_prefetch -= at.step;
    d_output_prefetch -= at.step;
  };
#pragma unroll
  for (int i = 0; i < kPrefetchSteps; ++i) prefetch(i);
  C weights[kWidth], bias;
  a.weights.template Load<1, kWidth>(geometry, at.example, at.channel, weights, &bias);
  const T* state_end = a.initial_state.End(geometry, at.example, at.channel);
  const auto mend = [&](int from, C* x, C* d_output) {
    MendWindow<kPast>(at, from, x_row + from, state_end, kPast - left_out, x);
    MendWindow<0, T>(at, from, d_output_row + from, nullptr, 0, d_output);
  };
  const auto zero_outside = [&](int from, C* values) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (at.before + from + i < 0 || from + i >= at.after) values[i] = 0;
    }
  };

  C following[kVec];  // dz of the previous step, which is later in the row
  // The masks of a vector and of the kPast times after it.
  const MasksOfRow<kVec + kPast> row_masks{masks_of_row, at.before, at.after};
#pragma unroll
  for (int i = 0; i < kVec; ++i) following[i] = 0;
  if (kPast > 0 && at.tile + 1 < grid.plan.tiles && lane * kVec < kPast) {
    const int next = steps * at.step;
    C x[kPast + kVec], d_output[kVec];
#pragma unroll
    for (int i = 0; i < kPast + kVec; ++i) {
      const int from = next + i - kPast;
      x[i] = from < at.after ? static_cast<C>(x_row[from]) : C{0};
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) d_output[i] = next + i < at.after ? static_cast<C>(d_output_row[next + i]) : C{0};
    Masks<kVec + kPast> masks{};
    if constexpr (kHasMasks) row_masks.template Load<kWidth>(geometry, next, &masks);
    PreActivationGradient<kWidth, kHasMasks, kVec>(x, d_output, weights, bias, masks, a.silu, following);
    zero_outside(next, following);
  }
  C sums[kWidth + 1] = {};
  const int first_lane = (threadIdx.x & 31) - lane;  // the group's first lane in its warp
  uint32_t borders = 0;
  if constexpr (kHasMasks && !kIsWide<kWidth>) borders = StepsWithBorders(at, grid.plan, masks_of_row, kWidth, kPast);
  for (int step = steps - 1; step >= 0; --step) {
    WaitForCopies<kPrefetchSteps - 2>();  // the next step too: it holds the inputs before this step's vectors
    __syncwarp();
    prefetch(kPrefetchSteps);
    const bool is_regular = at.IsRegular(offset), are_regular = __all_sync(kFullWarp, is_regular);
    C x[kPast + kVec], d_output[kVec], dx[kVec];
    stages.template Read<kPast>(x_stages, position, x);
    stages.template Read<0>(d_output_stages, position, d_output);
    if (!are_regular && !is_regular) mend(offset, x, d_output);
    Masks<kVec + kPast> masks{};
    const auto compute = [&](auto is_masked) {
      constexpr bool kIsMasked = decltype(is_masked)::value;
      C dz[kVec + kPast];  // of the vector and of the kPast times after it
      PreActivationGradient<kWidth, kIsMasked, kVec>(x, d_output, weights, bias, masks, a.silu, dz);
      if (!are_regular) zero_outside(offset, dz);
#pragma unroll
      for (int j = 0; j < kPast; ++j) {
        const int away = 1 + j / kVec;  // distance in lanes to the lane that has this dz
        const C offered = lane < away ? following[j % kVec] : dz[j % kVec];
        dz[kVec + j] = __shfl_sync(kFullWarp, offered, first_lane + ((lane + away) & (lanes - 1)));
      }
#pragma unroll
      for (int j = 0; j < kVec; ++j) following[j] = dz[j];
#pragma unroll
      for (int j = 0; j < kVec; ++j) dx[j] = 0;
      // Products of dz at time t with the weight and with the input k steps before t, if both are in one sequence.
      const auto add_products = [&](const auto& is_summed) {
#pragma unroll
        for (int t = 0; t < kVec + kPast; ++t) {
          const bool is_own = t < kVec && is_summed(t);
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            if (!kIsMasked || k == 0 || masks.Has(t, k)) {
              if (t >= k && t - k < kVec) dx[t - k] = fma(weights[kPast - k], dz[t], dx[t - k]);
              if (is_own) sums[kPast - k] = fma(dz[t], x[t + kPast - k], sums[kPast - k]);
            }
          }
          if (is_own) sums[kWidth] += dz[t];
        }
      };
      if (are_regular) {
        add_products([](int) { return true; });
      } else {
        // Skip times outside the row: 0 times an input at the end of the row would be NaN if the input is NaN.
        add_products([&](int t) { return at.before + offset + t >= 0 && offset + t < at.after; });
      }
    };
    if (kIsWide<kWidth> || (kHasMasks && (borders >> step & 1u) != 0)) {
      row_masks.template Load<kWidth>(geometry, offset, &masks);
      compute(std::true_type{});
    } else {
      compute(std::false_type{});
    }
    if (are_regular) {
      StoreNarrow<T, kVec>(dx_row + offset, dx);
    } else if (at.is_real) {
      StoreInRow(at, offset, dx_row + offset, dx);
    }
    position -= step_bytes;
    offset -= at.step;
  }
#pragma unroll
  for (int k = 0; k <= kWidth; ++k) {
    for (int away = lanes / 2; away > 0; away /= 2) sums[k] += __shfl_xor_sync(kFullWarp, sums[k], away);
  }
  if (lane == 0 && at.is_real) {
    C* partial = a.Partial(at.example, at.tile, grid.plan.tiles, kWidth - left_out, at.channel);
#pragma unroll
    for (int k = 0; k <= kWidth; ++k) {
      if (k >= left_out) partial[(k - left_out) * geometry.channels] = sums[k];
    }
  }
}

inline constexpr int kMaxSumThreads = Tuning::kMinSumChannels * Tuning::kMaxSumLanes;

// Adds up the partial sums of each channel. Threads of a block along x have neighbouring channels; threads along y
// share the partial sums of a channel.
template <typename C>
__global__ void __launch_bounds__(kMaxSumThreads)
    SumParameterGradients(const C* partials, int64_t parts, int width, int64_t channels, Divider by_blocks_across,
                          C* dweight, C* dbias) {
  __shared__ double shared[kMaxSumThreads];
  const int64_t block = blockIdx.x, band = by_blocks_across.Quotient(block);  // band: index in [batch, width + 1]
  const int64_t batch = band / (width + 1);
  const int k = static_cast<int>(band - batch * (width + 1));
  const int64_t channel = (block - band * static_cast<int64_t>(by_blocks_across.divisor)) * blockDim.x + threadIdx.x;
  const bool is_real = channel < channels;
  const int lane = threadIdx.y, lanes = blockDim.y, columns = blockDim.x;
  const double sum = SumPartials(partials + (batch * parts * (width + 1) + k) * channels + channel, is_real ? parts : 0,
                                 (width + 1) * channels, lane, lanes, shared + lane * columns + threadIdx.x, columns);
  if (lane != 0 || !is_real) return;
  if (k < width) {
    dweight[(batch * channels + channel) * width + k] = static_cast<C>(sum);
  } else {
    dbias[batch * channels + channel] = static_cast<C>(sum);
  }
}

template <typename C>
CudaStatus LaunchSumParameterGradients(const BackwardCall& call, int64_t parts, cudaStream_t stream) {
  const Problem& problem = call.problem;
  int lanes = 1;
  while (lanes < Tuning::kMaxSumLanes && lanes * 2 * Tuning::kPartialsOfThread <= parts) lanes *= 2;
  const int channels = std::clamp(Tuning::kSumThreads / lanes, static_cast<int>(Tuning::kMinSumChannels),
                                  static_cast<int>(Tuning::kMaxSumChannels));
  const int64_t across = CeilDivide(problem.channels, channels);
  const int64_t blocks = problem.batch * (problem.width + 1) * across;
  if (blocks == 0) return {};
  SumParameterGradients<C><<<GridSize(blocks), dim3(channels, lanes), 0, stream>>>(
      static_cast<const C*>(call.scratch), parts, problem.width, problem.channels, Divider(across),
      static_cast<C*>(call.dweight), static_cast<C*>(call.dbias));
  return JB_LAUNCH_STATUS(SumParameterGradients);
}

// Recomputes the gradients of some times of each row, starting at `first`, one per thread. Times before 0 are the
// initial state's. The others are the last inputs, if d_final_state contributes to their gradients.
template <typename T>
__global__ void __launch_bounds__(kRowsThreads)
    BackwardEnd(const __grid_constant__ BackwardArguments<T> a, int width, bool channels_last, int64_t first,
                Divider by_count, int64_t size, T* d_initial_state) {
  using C = ComputeType<T>;
  const Geometry& geometry = a.geometry;
  const int past = width - 1;
  const int64_t index = int64_t{blockIdx.x} * kRowsThreads + threadIdx.x;
  if (index >= size) return;
  const int64_t row = by_count.Quotient(index), example = geometry.by_channels.Quotient(row);
  const int64_t channel = row - example * geometry.channels;
  const int64_t time = index - row * static_cast<int64_t>(by_count.divisor) + first;
  const int64_t stride = channels_last ? geometry.channels : 1;
  const int64_t in_example = channels_last ? channel : channel * geometry.length;
  const int64_t example_size = geometry.channels * geometry.length;
  const T* x = a.x.data + a.x.Example(geometry, example) * example_size + in_example;
  const T* d_output = a.d_output.data + a.d_output.Example(geometry, example) * example_size + in_example;
  const T* state_end = a.initial_state.End(geometry, example, channel);
  const uint8_t* same_sequence = a.same_sequence.data;
  if (same_sequence != nullptr) same_sequence += a.same_sequence.Example(geometry, example) * geometry.length;
  const int64_t weight_row = a.weights.weight.Row(geometry, example, channel) * width;
  const C bias = a.weights.bias.LoadOptional(a.weights.bias.Row(geometry, example, channel));
  const auto weight = [&](int k) { return a.weights.weight.LoadOptional(weight_row + k); };

  C gradient = 0;
  for (int64_t t = max(time, int64_t{0}); t <= time + past && t < geometry.length; ++t) {
    const uint32_t bits = same_sequence != nullptr ? same_sequence[t] : ~0u;
    if ((bits >> (t - time) & 1u) == 0) continue;
    C dz = static_cast<C>(d_output[t * stride]);
    if (a.silu) {
      C z = bias;
      for (int k = 0; k < width; ++k) {
        const int64_t source = t - past + k;
        if ((bits >> (past - k) & 1u) == 0 || (source < 0 && state_end == nullptr)) continue;
        z = fma(weight(k), static_cast<C>(source >= 0 ? x[source * stride] : state_end[source]), z);
      }
      dz = SiluBackward(z, dz);
    }
    gradient = fma(weight(past - static_cast<int>(t - time)), dz, gradient);
  }
  const int64_t newer = geometry.length - 1 - time;  // the number of inputs after this one
  if (a.d_final_state.entries.data != nullptr && newer < past) {
    const uint32_t bits = same_sequence != nullptr && geometry.length > 0 ? same_sequence[geometry.length - 1] : ~0u;
    if (bits >> newer & 1u) gradient += static_cast<C>(a.d_final_state.End(geometry, example, channel)[-1 - newer]);
  }
  if (time < 0) {
    d_initial_state[row * past + past + time] = static_cast<T>(gradient);
  } else {
    a.dx[example * example_size + in_example + time * stride] = static_cast<T>(gradient);
  }
}

template <typename T>
CudaStatus LaunchEnd(const BackwardCall& call, int64_t first, int64_t count, cudaStream_t stream) {
  const Problem& problem = call.problem;
  const int64_t size = problem.batch * problem.examples * problem.channels * count;
  if (size == 0) return {};
  BackwardEnd<T><<<GridSize(CeilDivide(size, kRowsThreads)), kRowsThreads, 0, stream>>>(
      BackwardArguments<T>(call), problem.width, problem.channels_last, first, Divider(count), size,
      static_cast<T*>(call.d_initial_state));
  return JB_LAUNCH_STATUS(BackwardEnd);
}

}  // namespace

CudaStatus BackwardCall::Run(cudaStream_t stream) const {
  const ConvolutionPlan plan = PlanOf(*this);
  if (scratch_bytes < plan.scratch_bytes) return JB_CUDA_STATUS(cudaErrorInvalidValue);
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) -> CudaStatus {
    using T = typename decltype(tag)::type;
    if (problem.channels_last && plan.strategy != Strategy::kNothing) {
      JB_RETURN_IF_CUDA_ERROR(LaunchChannelsLast(*this, plan, stream));
    } else if (plan.strategy != Strategy::kNothing) {
      const RowsGrid grid(plan);
      JB_RETURN_IF_CUDA_ERROR(DispatchKernel(problem.width, problem.has_same_sequence, [&](auto width, auto has_masks) {
        const auto kernel = BackwardRows<T, width, has_masks>;
        kernel<<<grid.Blocks(), kRowsThreads, 0, stream>>>(BackwardArguments<T>(*this), grid);
        return JB_LAUNCH_STATUS(BackwardRows);
      }));
    }
    JB_RETURN_IF_CUDA_ERROR(LaunchSumParameterGradients<ComputeType<T>>(*this, plan.parts, stream));
    const int64_t past = problem.width - 1, last_inputs = std::min(past, problem.length);
    if (d_final_state.data != nullptr) {
      JB_RETURN_IF_CUDA_ERROR(LaunchEnd<T>(*this, problem.length - last_inputs, last_inputs, stream));
    }
    return d_initial_state != nullptr ? LaunchEnd<T>(*this, -past, past, stream) : CudaStatus{};
  });
}

}  // namespace jax_baracuda::causal_conv1d
