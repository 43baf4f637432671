// The forward kernel for [.., length, channels].
#include <type_traits>

#include "ffi/causal_conv1d/channels_last.cuh"
#include "ffi/causal_conv1d/state_pool.cuh"

namespace jax_baracuda::causal_conv1d {
namespace {

// How the sequences of an array are told apart.
enum class Sequences {
  kOne,     // there is one
  kMasked,  // by a mask for each time
  kRagged,  // by their starts; each may begin with a state from a pool
};

template <typename T, Sequences kSequences>
using ArgumentsOf = std::conditional_t<kSequences == Sequences::kRagged, RaggedArguments<T>, ForwardArguments<T>>;

// Where a thread is among the sequences of a ragged call.
struct RaggedRun {
  int next;  // the first row of the next sequence
  bool is_padding = false;
  int32_t index;     // of the sequence
  int32_t position;  // in it, of the row that was entered last

  // Finds the sequence of a row.
  template <typename T>
  __device__ __forceinline__ void Enter(const RaggedArguments<T>& a, const ChannelsLastPlace& at, int row) {
    const int32_t begin = static_cast<int32_t>(at.begin), sequences = static_cast<int32_t>(a.pool.sequences);
    const SequenceAt sequence(a.starts.Of(at.example), sequences, begin + row);
    index = sequence.index;
    is_padding = index < 0 || index >= sequences;
    next = sequence.end - begin;
    position = begin + row - sequence.begin;
  }

  // Calls set_past(k, v, value) for the inputs before the row that belong to the state of its sequence, or are zero:
  // input k is kPast - k steps before the row.
  template <int kVec, int kPast, typename T, typename SetPast>
  __device__ __forceinline__ void LoadState(const RaggedArguments<T>& a, const ChannelsLastPlace& at, int left_out,
                                            const SetPast& set_past) const {
    if (position >= kPast) return;
    const T* state = nullptr;
    if (!is_padding && a.has_state.Of(at.example)[index] != 0) {
      const int64_t slot = a.pool.slots_of_sequences.Of(at.example)[index];
      if (a.pool.Has(slot)) state = a.pool.Row(a.geometry, at.example, slot, at.channel);
    }
#pragma unroll
    for (int k = 0; k < kPast; ++k) {
      if (k + position >= kPast) continue;
      const int entry = k + position - left_out;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const bool is_there = state != nullptr && entry >= 0;
        set_past(k, v, is_there ? static_cast<ComputeType<T>>(state[v * a.pool.length + entry]) : ComputeType<T>{0});
      }
    }
  }
};

template <typename T, int kWidth, int kVec, Sequences kSequences>
__global__ void __launch_bounds__(kChannelsLastThreads, Tuning::ForwardChannelsLastBlocks(sizeof(T), kWidth))
    ForwardChannelsLast(const __grid_constant__ ArgumentsOf<T, kSequences> a,
                        const __grid_constant__ ChannelsLastGrid grid) {
  using C = ComputeType<T>;
  constexpr bool kIsRagged = kSequences == Sequences::kRagged;
  constexpr bool kHasMasks = kSequences == Sequences::kMasked || kIsWide<kWidth>;
  constexpr int kPast = kWidth - 1, kRows = kRowsOfCircle<kWidth>;
  using Stages = TimeStages<T, kVec, Tuning::kForwardStageTimes, kRows>;
  __shared__ alignas(kVectorBytes) char shared[Stages::kBlockBytes];
  const Geometry& geometry = a.geometry;
  const ChannelsLastPlace at(geometry, grid, kVec);
  if (at.channel >= geometry.channels || at.count <= 0) return;
  const T* x = at.In(a.x, geometry);
  T* y = a.y + at.Index(geometry, at.example);
  const uint8_t* same_sequence = nullptr;
  if (kSequences == Sequences::kMasked && a.same_sequence.data != nullptr)
    same_sequence = at.Times(a.same_sequence, geometry);

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
  RaggedRun run;
  if constexpr (kIsRagged) {
    run.Enter(a, at, 0);
  }
  C weight[kVec][kWidth], bias[kVec];
  a.weights.template Load<kVec, kWidth>(geometry, at.example, at.channel, weight[0], bias);
  C inputs[kWidth][kVec];
  LoadPast<kVec, kPast>(geometry, x, a.initial_state, at, geometry.template LeftOut<kWidth>(), inputs);
  const auto load_state = [&](int i) {
    if constexpr (kIsRagged) {
      run.LoadState<kVec, kPast>(a, at, geometry.template LeftOut<kWidth>(),
                                 [&](int k, int v, C value) { inputs[(i + k) % kWidth][v] = value; });
    }
  };
  load_state(0);
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
      if constexpr (kIsRagged) {
        if (first + i == run.next) {
          run.Enter(a, at, first + i);
          load_state(i);
        }
      }
      stages.Read(first + i, inputs[(i + kPast) % kWidth]);
      if (Stages::EndsGroup(i)) load_group(first + i + 1 - Stages::kGroupTimes + Stages::kAhead);
#pragma unroll
      for (int v = 0; v < kVec; ++v) KeepWide(inputs[(i + kPast) % kWidth][v]);
      C out[kVec] = {};
      if (!kIsRagged || !run.is_padding) {
        ConvolveRow<kWidth, kVec, kHasMasks>(weight, bias, inputs, i, masks[i], out);
        if (a.silu) {
#pragma unroll
          for (int v = 0; v < kVec; ++v) out[v] = Silu(out[v]);
        }
      }
      if (first + i < at.count) StoreNarrow<T, kVec>(y, out);
      y += geometry.channels;
    }
  }
}

}  // namespace

CudaStatus LaunchChannelsLast(const OutputCall& call, const ConvolutionPlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LaunchOnGrid<T>(
        call, plan, ForwardArguments<T>(call), stream, [](auto width, auto channels, auto has_masks) {
          return ForwardChannelsLast < T, width, channels, has_masks ? Sequences::kMasked : Sequences::kOne > ;
        });
  });
}

CudaStatus LaunchChannelsLast(const RaggedCall& call, const ConvolutionPlan& plan, cudaStream_t stream) {
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LaunchOnGrid<T>(call, plan, RaggedArguments<T>(call), stream, [](auto width, auto channels, auto) {
      return ForwardChannelsLast<T, width, channels, Sequences::kRagged>;
    });
  });
}

}  // namespace jax_baracuda::causal_conv1d
