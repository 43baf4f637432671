// Kernels that update a pool of states: of decoder steps, and of the sequences of a ragged call.
#include <algorithm>

#include "ffi/causal_conv1d/state_pool.cuh"
#include "ffi/causal_conv1d/tuning.h"

namespace jax_baracuda::causal_conv1d {
namespace {

inline constexpr int kThreads = 128;

// Sequences of a block of UpdatePool, which loads weights once for all of them. More would leave too few blocks.
inline constexpr int kMaxSequencesOfBlock = 4;
inline constexpr int kUpdateBlocks = 8;  // resident per multiprocessor

// ---- Decoder steps.

template <typename T>
struct PoolUpdateArguments : ForwardArguments<T> {
  Pool<T> pool;
  BatchArray<int32_t> num_accepted;  // without data, states begin at the first entry of a row
  int64_t num_written;
  bool channels_last;
  int sequences_of_block;
  Divider by_blocks_across, by_groups;  // a group is the sequences of a block

  PoolUpdateArguments(const PoolUpdateCall& call, int channels_of_block)
      : ForwardArguments<T>(call),
        pool(call.pool),
        num_accepted(call.num_accepted, call.problem.examples),
        num_written(call.num_written()),
        channels_last(call.problem.channels_last),
        by_blocks_across(CeilDivide(call.problem.channels, channels_of_block)) {
    const int64_t examples = call.problem.examples, blocks_across = static_cast<int64_t>(by_blocks_across.divisor);
    const int64_t at_once = Tuning::kMultiprocessors * int64_t{kUpdateBlocks};
    const int64_t of_block = CeilDivide(call.problem.batch * examples * blocks_across, at_once);
    sequences_of_block = static_cast<int>(std::min<int64_t>(of_block, kMaxSequencesOfBlock));
    by_groups = Divider(CeilDivide(examples, sequences_of_block));
  }
};

// The inputs of a thread's channels before a step, the newest last.
template <typename T, int kPast, int kVec>
struct History {
  T inputs[kPast + 1][kVec];  // + 1: kPast may be 0

  // Vectors of channels have rows of kPast entries, which are loaded as words.
  __device__ __forceinline__ void Load(const T* row, int left_out) {
    if constexpr (kVec > 1) {
      T entries[kVec * kPast + 1];
#pragma unroll
      for (int i = 0; i < kPast; ++i) {
        const Packed<T, kVec> word = LoadPacked<kVec>(row + i * kVec);
        memcpy(entries + i * kVec, &word, sizeof(word));
      }
#pragma unroll
      for (int k = 0; k < kPast; ++k) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) inputs[k][v] = entries[v * kPast + k];
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPast; ++k) inputs[k][0] = k >= left_out ? row[k - left_out] : T{};
    }
  }

  __device__ __forceinline__ void Store(T* row) const {
    T entries[kVec * kPast + 1];
#pragma unroll
    for (int k = 0; k < kPast; ++k) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) entries[v * kPast + k] = inputs[k][v];
    }
#pragma unroll
    for (int i = 0; i < kPast; ++i) {
      Packed<T, kVec> word;
      memcpy(&word, entries + i * kVec, sizeof(word));
      StorePacked<T, kVec>(row + i * kVec, word);
    }
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int k = 0; k < kPast; ++k) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) inputs[k][v] = T{};
    }
  }
};

// A block has channels of a few sequences. If several sequences have the same slot, the block of the last one steps all of
// them, because their states must be read before one is written. With kVec > 1, rows of the pool have exactly kWidth - 1
// entries, and channels are last or there is one input.
template <typename T, int kWidth, int kVec>
__global__ void __launch_bounds__(kThreads, kUpdateBlocks)
    UpdatePool(const __grid_constant__ PoolUpdateArguments<T> a) {
  using C = ComputeType<T>;
  constexpr int kPast = kWidth - 1;
  // Bits 2 i and 2 i + 1: whether an earlier, or a later, sequence has the slot of the block's sequence i.
  __shared__ uint32_t shared_flags;
  if (threadIdx.x == 0) shared_flags = 0;
  const Geometry& geometry = a.geometry;
  const int64_t band = a.by_blocks_across.Quotient(blockIdx.x);
  const int64_t block_across = int64_t{blockIdx.x} - band * static_cast<int64_t>(a.by_blocks_across.divisor);
  const int64_t channel = (block_across * kThreads + threadIdx.x) * kVec;
  const int64_t batch = a.by_groups.Quotient(band), first = batch * a.pool.sequences;
  const int64_t begin = (band - batch * static_cast<int64_t>(a.by_groups.divisor)) * a.sequences_of_block;
  const int count = static_cast<int>(min(a.pool.sequences - begin, int64_t{a.sequences_of_block}));
  const int32_t* const slots = a.pool.slots_of_sequences.Of(batch);
  const bool is_inside = channel < geometry.channels;
  const int left_out = geometry.template LeftOut<kWidth>();
  const int64_t time_stride = a.channels_last ? geometry.channels : 1;

  const auto first_input = [&](int64_t of_example) {
    return of_example * geometry.length * geometry.channels + (a.channels_last ? channel : channel * geometry.length);
  };
  const auto row_of = [&](int64_t of_sequence) {
    T* row = a.pool.Row(geometry, batch, slots[of_sequence], channel);
    if (kVec == 1 && a.num_accepted.data != nullptr) {
      const int64_t latest = a.pool.length - (geometry.width - 1);
      row += max(min(int64_t{a.num_accepted.Of(batch)[of_sequence]} - 1, latest), int64_t{0});
    }
    return row;
  };
  History<T, kPast, kVec> history;
  C weights[kVec * kWidth], biases[kVec];
  Packed<T, kVec> input{};
  const auto load = [&](int64_t of_sequence) {
    input = LoadPacked<kVec>(a.x.data + first_input(a.x.Example(geometry, first + of_sequence)));
    history.Clear();
    if (a.pool.Has(slots[of_sequence])) history.Load(row_of(of_sequence), left_out);
  };
  // Replaces the history by that after the step.
  const auto step = [&](int64_t of_sequence) {
    const T* x = a.x.data + first_input(a.x.Example(geometry, first + of_sequence));
    T* y = a.y + first_input(first + of_sequence);
    for (int64_t time = 0; time < geometry.length; ++time) {
      memcpy(history.inputs[kPast], &input, sizeof(input));
      if (time + 1 < geometry.length) input = LoadPacked<kVec>(x + (time + 1) * time_stride);
      C z[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        z[v] = biases[v];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          if (k >= left_out) z[v] = fma(weights[v * kWidth + k], static_cast<C>(history.inputs[k][v]), z[v]);
        }
        if (a.silu) z[v] = Silu(z[v]);
      }
      StoreNarrow<T, kVec>(y + time * time_stride, z);
#pragma unroll
      for (int k = 0; k < kPast; ++k) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) history.inputs[k][v] = history.inputs[k + 1][v];
      }
    }
  };

  // The first loads do not wait for the search for sequences with the same slots.
  if (is_inside) {
    load(begin);
    a.weights.template Load<kVec, kWidth>(geometry, first, channel, weights, biases);
  }
  int32_t own_slots[kMaxSequencesOfBlock];
#pragma unroll
  for (int i = 0; i < kMaxSequencesOfBlock; ++i) own_slots[i] = i < count ? slots[begin + i] : -1;
  uint32_t found = 0;
  for (int64_t i = threadIdx.x; i < a.pool.sequences; i += kThreads) {
    const int32_t slot = slots[i];
    if (!a.pool.Has(slot)) continue;
#pragma unroll
    for (int own = 0; own < kMaxSequencesOfBlock; ++own) {
      if (slot == own_slots[own] && i != begin + own) found |= (i < begin + own ? 1u : 2u) << (2 * own);
    }
  }
  __syncthreads();  // the flags are zero
  if (found != 0) atomicOr(&shared_flags, found);
  __syncthreads();
  if (!is_inside) return;
  for (int own = 0; own < count; ++own) {
    const uint32_t flags = shared_flags >> (2 * own);
    if ((flags & 2u) != 0) continue;
    const int64_t sequence = begin + own;
    if ((flags & 1u) != 0) {
      for (int64_t i = 0; i < sequence; ++i) {
        if (slots[i] != slots[sequence]) continue;
        load(i);
        step(i);
      }
    }
    if (own > 0 || (flags & 1u) != 0) load(sequence);
    // The rows of drafts also hold inputs that the step shifts out of the history.
    T oldest[kPast + 1];
#pragma unroll
    for (int k = 0; k < kPast; ++k) oldest[k] = history.inputs[k][0];
    step(sequence);
    if (!a.pool.Has(slots[sequence])) continue;
    T* const row = a.pool.Row(geometry, batch, slots[sequence], channel);
    if constexpr (kVec > 1) {
      history.Store(row);
    } else if (a.num_accepted.data == nullptr) {
#pragma unroll
      for (int k = 0; k < kPast; ++k) {
        if (k >= left_out) row[k - left_out] = history.inputs[k][0];
      }
    } else if (geometry.width > 1) {
#pragma unroll
      for (int k = 1; k < kPast; ++k) {
        if (k > left_out) row[k - left_out - 1] = oldest[k];
      }
      const T* const x = a.x.data + first_input(a.x.Example(geometry, first + sequence));
      for (int64_t time = 0; time < geometry.length; ++time) row[geometry.width - 2 + time] = x[time * time_stride];
    }
  }
}

// ---- The states after the sequences of a ragged call.

inline constexpr int kStateChannels = 4;  // per thread

// A block has channels of one sequence. It runs after the convolution, which reads the old states.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    WriteStates(const __grid_constant__ RaggedArguments<T> a, const __grid_constant__ Divider by_blocks_across,
                const __grid_constant__ Divider by_sequences) {
  const Geometry& geometry = a.geometry;
  const int64_t number = by_blocks_across.Quotient(blockIdx.x);
  const int64_t block_across = int64_t{blockIdx.x} - number * static_cast<int64_t>(by_blocks_across.divisor);
  const int64_t batch = by_sequences.Quotient(number), sequence = number - batch * a.pool.sequences;
  const int32_t *const slots = a.pool.slots_of_sequences.Of(batch), *const starts = a.starts.Of(batch);
  const int64_t slot = slots[sequence];
  if (!a.pool.Has(slot)) return;
  const auto clamped = [&](int64_t i) { return max(min(int64_t{starts[i]}, geometry.length), int64_t{0}); };
  const int64_t begin = clamped(sequence), end = clamped(sequence + 1);
  if (begin >= end) return;
  bool is_later = false;
  for (int64_t i = sequence + 1 + threadIdx.x; i < a.pool.sequences; i += kThreads) {
    is_later = is_later || (slots[i] == slot && clamped(i) < clamped(i + 1));
  }
  if (__syncthreads_or(is_later)) return;
  const bool has_state = a.has_state.Of(batch)[sequence] != 0;
  const int64_t past = geometry.width - 1, count = end - begin;
  const T* const x = a.x.data + a.x.Example(geometry, batch) * geometry.length * geometry.channels;
#pragma unroll
  for (int i = 0; i < kStateChannels; ++i) {
    const int64_t channel = (block_across * kStateChannels + i) * kThreads + threadIdx.x;
    if (channel >= geometry.channels) continue;
    T* const row = a.pool.Row(geometry, batch, slot, channel);
    for (int64_t k = 0; k < past; ++k) {
      const int64_t old = k + count;  // the entry of the old state that moves here, if the sequence is that short
      row[k] = old >= past ? x[(end - past + k) * geometry.channels + channel] : has_state ? row[old] : T{};
    }
  }
}

}  // namespace

CudaStatus PoolUpdateCall::Run(cudaStream_t stream) const {
  JB_RETURN_IF_CUDA_ERROR(LaunchCopy(pool.of_old_states, stream));
  const ConvolutionPlan plan = PlanOf(*this);
  if (plan.strategy == Strategy::kNothing) return {};
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kUpdateChannels = static_cast<int>(Tuning::kUpdateBytes / sizeof(T));
    const auto launch = [&](auto width, auto channels) -> CudaStatus {
      const PoolUpdateArguments<T> arguments(*this, kThreads * channels);
      const int64_t blocks = problem.batch * static_cast<int64_t>(arguments.by_groups.divisor) *
                             static_cast<int64_t>(arguments.by_blocks_across.divisor);
      UpdatePool<T, width, channels><<<GridSize(blocks), kThreads, 0, stream>>>(arguments);
      return JB_LAUNCH_STATUS(UpdatePool);
    };
    if (kUpdateChannels > 1 && plan.strategy == Strategy::kPoolVectors) {
      return DispatchWidth(problem.width,
                           [&](auto width) { return launch(width, std::integral_constant<int, kUpdateChannels>{}); });
    }
    return DispatchKernel(problem.width, /*has_masks=*/false,
                          [&](auto width, auto) { return launch(width, std::integral_constant<int, 1>{}); });
  });
}

CudaStatus RaggedCall::Run(cudaStream_t stream) const {
  JB_RETURN_IF_CUDA_ERROR(LaunchCopy(pool.of_old_states, stream));
  const ConvolutionPlan plan = PlanOf(*this);
  if (plan.strategy == Strategy::kNothing) return {};
  JB_RETURN_IF_CUDA_ERROR(LaunchChannelsLast(*this, plan, stream));
  const int64_t sequences = problem.batch * pool.sequences;
  if (sequences == 0 || pool.slots == 0 || problem.width == 1) return {};
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t blocks_across = CeilDivide(problem.channels, int64_t{kThreads} * kStateChannels);
    WriteStates<T><<<GridSize(sequences * blocks_across), kThreads, 0, stream>>>(
        RaggedArguments<T>(*this), Divider(blocks_across), Divider(pool.sequences));
    return JB_LAUNCH_STATUS(WriteStates);
  });
}

}  // namespace jax_baracuda::causal_conv1d
