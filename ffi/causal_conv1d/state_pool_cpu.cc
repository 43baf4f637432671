// The CPU targets of convolutions of sequences whose states are in a pool.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/causal_conv1d/convolution_cpu.h"
#include "ffi/causal_conv1d/tiles_cpu.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"

namespace jax_baracuda::causal_conv1d {
namespace {

// Sequence `index` of a batch element has `count` inputs from time `begin` of its example on.
struct Sequence {
  int64_t batch, index, example, begin, count;
};

// The states of all sequences before a call, [batch, sequences, channels, width - 1]. With these copies, the pool can be
// written in place.
template <typename T>
class OldStates {
 public:
  // `begin(sequence)` is the entry of its row in the pool at which a sequence's state begins, or -1 for zeros.
  template <typename Begin>
  bool Load(ffi::ThreadPool& threads, const Problem& problem, const StatePool& pool, const Begin& begin) {
    channels_ = problem.channels;
    sequences_ = pool.sequences;
    length_ = problem.width - 1;
    const int64_t rows = problem.batch * sequences_;
    states_ = Allocate<T>(rows * channels_ * length_);
    if (states_ == nullptr) return false;
    ForEachRange(threads, rows, 2 * rows * channels_ * length_ * static_cast<int64_t>(sizeof(T)),
                 [&](int64_t first, int64_t end) {
                   for (int64_t row = first; row < end; ++row) {
                     const int64_t batch = row / sequences_, index = row % sequences_;
                     T* const to = states_.get() + row * channels_ * length_;
                     const int64_t slot = SlotOf(pool, batch, index), entry = slot < 0 ? -1 : begin(batch, index);
                     if (entry < 0) {
                       WriteZeros(to, channels_ * length_);
                       continue;
                     }
                     const T* const from = static_cast<const T*>(pool.data) +
                                           (batch * pool.slots + slot) * channels_ * pool.length + entry;
                     for (int64_t c = 0; c < channels_; ++c) {
                       std::memcpy(to + c * length_, from + c * pool.length, static_cast<size_t>(length_) * sizeof(T));
                     }
                   }
                 });
    return true;
  }

  // -1 for a slot outside of the pool.
  static int64_t SlotOf(const StatePool& pool, int64_t batch, int64_t index) {
    const int64_t slot = pool.slots_of_sequences.Of<int32_t>(batch, pool.sequences)[index];
    return slot >= 0 && slot < pool.slots ? slot : -1;
  }

  const T* get() const { return states_.get(); }
  const T* At(int64_t batch, int64_t index, int64_t channel) const {
    return states_.get() + ((batch * sequences_ + index) * channels_ + channel) * length_;
  }

 private:
  int64_t sequences_ = 0, channels_ = 0, length_ = 0;
  Memory<T> states_;
};

// Writes the states after the sequences: the last `num_written` of the old and new inputs of each, from the first entry
// of a row on. Of the sequences of a slot, only the last one writes. They are in order.
template <typename T>
bool WriteStates(ffi::ThreadPool& threads, const OutputCall& call, const StatePool& pool,
                 const std::vector<Sequence>& sequences, const OldStates<T>& old_states, int64_t num_written,
                 const Convolution<T>& convolution) {
  const Problem& problem = call.problem;
  if (num_written == 0) return true;
  const std::unique_ptr<bool[]> is_written(new (std::nothrow) bool[problem.batch * pool.slots]());
  if (is_written == nullptr) return false;
  std::vector<Sequence> writers;
  for (auto it = sequences.rbegin(); it != sequences.rend(); ++it) {
    const int64_t slot = OldStates<T>::SlotOf(pool, it->batch, it->index);
    if (slot < 0 || is_written[it->batch * pool.slots + slot]) continue;
    is_written[it->batch * pool.slots + slot] = true;
    writers.push_back(*it);
  }
  const int64_t count = static_cast<int64_t>(writers.size()), past = problem.width - 1;
  ForEachRange(threads, count, 2 * count * problem.channels * num_written * static_cast<int64_t>(sizeof(T)),
               [&](int64_t first, int64_t end) {
                 for (int64_t i = first; i < end; ++i) {
                   const Sequence& own = writers[i];
                   const Place place{own.batch, own.example, 0, problem.channels};
                   const int64_t slot = OldStates<T>::SlotOf(pool, own.batch, own.index);
                   T* row =
                       static_cast<T*>(pool.data) + (own.batch * pool.slots + slot) * problem.channels * pool.length;
                   const T* old = old_states.At(own.batch, own.index, 0);
                   const T* x = convolution.At(call.x, place, own.begin);
                   const int64_t skipped = past + own.count - num_written;
                   const int64_t channel_stride = problem.channels_last ? 1 : problem.length;
                   for (int64_t c = 0; c < problem.channels; ++c) {
                     for (int64_t k = 0; k < num_written; ++k) {
                       const int64_t from = skipped + k;
                       row[k] = from < past ? old[from] : x[(from - past) * convolution.time_stride()];
                     }
                     row += pool.length;
                     old += past;
                     x += channel_stride;
                   }
                 }
               });
  return true;
}

template <typename T>
bool ComputeRagged(ffi::ThreadPool& threads, const RaggedCall& call, const Convolution<T>& convolution) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  if (problem.HasNoElement()) return true;
  const StatePool& pool = call.pool;
  OldStates<T> old_states;
  const bool has_memory = old_states.Load(threads, problem, pool, [&](int64_t batch, int64_t index) {
    return call.has_state.Of<bool>(batch, pool.sequences)[index] ? 0 : -1;
  });
  if (!has_memory) return false;

  // Sequences follow each other. Times that no sequence has are padding, which is a sequence without a number.
  constexpr int64_t kPadding = -1;
  std::vector<Sequence> sequences, all;
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    const int32_t* const starts = call.starts.Of<int32_t>(batch, pool.sequences + 1);
    int64_t time = 0;
    const auto pad = [&](int64_t end) {
      if (end > time) all.push_back({batch, kPadding, 0, time, end - time});
      time = std::max(time, end);
    };
    for (int64_t i = 0; i < pool.sequences; ++i) {
      const int64_t end = std::clamp<int64_t>(starts[i + 1], 0, problem.length);
      const int64_t begin = std::max(time, std::clamp<int64_t>(starts[i], 0, problem.length));
      if (begin >= end) continue;
      pad(begin);
      sequences.push_back({batch, i, 0, begin, end - begin});
      all.push_back(sequences.back());
      time = end;
    }
    pad(problem.length);
  }

  // Tiles of all sequences, in memory order.
  const int64_t tile_times = convolution.tile_times(), tile_channels = convolution.TileChannels(/*num_tiles=*/1);
  const int64_t channel_tiles = CeilDivide(problem.channels, tile_channels);
  std::vector<int64_t> first_tiles{0};
  for (const Sequence& own : all) {
    first_tiles.push_back(first_tiles.back() + CeilDivide(own.count, tile_times) * channel_tiles);
  }
  const int64_t bytes = problem.batch * problem.channels * problem.length * static_cast<int64_t>(sizeof(T));
  std::atomic<bool> tiles_have_memory{true};
  ForEachRange(threads, first_tiles.back(), bytes, [&](int64_t begin, int64_t end) {
    const int64_t window = tile_times + convolution.reach();
    const auto memory = Allocate<C>((window + tile_times) * tile_channels);
    if (memory == nullptr) {
      tiles_have_memory = false;
      return;
    }
    size_t s =
        static_cast<size_t>(std::upper_bound(first_tiles.begin(), first_tiles.end(), begin) - first_tiles.begin() - 1);
    for (int64_t tile = begin; tile < end; ++tile) {
      while (tile >= first_tiles[s + 1]) ++s;
      const Sequence& own = all[s];
      const int64_t in_sequence = tile - first_tiles[s];
      const int64_t time = own.begin + in_sequence / channel_tiles * tile_times;
      const int64_t channel = in_sequence % channel_tiles * tile_channels;
      const int64_t times = std::min(tile_times, own.begin + own.count - time);
      const Place place{own.batch, 0, channel, std::min(tile_channels, problem.channels - channel)};
      if (own.index == kPadding) {
        T* y = convolution.At(static_cast<T*>(call.y), /*is_shared=*/false, place, time);
        for (int64_t t = 0; t < times; ++t, y += convolution.time_stride()) WriteZeros(y, place.channels);
        continue;
      }
      const T* const state = old_states.At(own.batch, own.index, channel);
      const auto in =
          convolution.InputsOfSequence(place, own.begin, state, time - convolution.reach(), time + times, memory.get());
      WriteTile(call, convolution, place, in, time, times, memory.get() + window * tile_channels);
    }
  });
  return tiles_have_memory && WriteStates(threads, call, pool, sequences, old_states, problem.width - 1, convolution);
}

template <typename T>
bool ComputeUpdate(ffi::ThreadPool& threads, PoolUpdateCall& call, const Convolution<T>& convolution) {
  const Problem& problem = call.problem;
  if (problem.HasNoElement()) return true;
  const int64_t latest = call.pool.length - (problem.width - 1);
  OldStates<T> old_states;
  const bool has_memory = old_states.Load(threads, problem, call.pool, [&](int64_t batch, int64_t index) {
    if (call.num_accepted.data == nullptr) return int64_t{0};
    const int64_t count = call.num_accepted.Of<int32_t>(batch, problem.examples)[index];
    return std::clamp<int64_t>(count - 1, 0, latest);
  });
  if (!has_memory) return false;
  // The convolution reads the states through the call.
  call.initial_state = BatchOperand{old_states.get(), /*is_shared=*/false};
  call.state_length = problem.width - 1;
  if (!ComputeForward(threads, call, convolution)) return false;
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < problem.batch * problem.examples; ++i) {
    const int64_t example = i % problem.examples;
    sequences.push_back({i / problem.examples, example, example, 0, problem.length});
  }
  return WriteStates(threads, call, call.pool, sequences, old_states, call.num_written(), convolution);
}

}  // namespace

std::vector<const char*> RaggedCall::Strategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kRows, Strategy::kChannelsLast);
}

Plan RaggedCall::MakePlan() const { return PlanOnCpu(*this); }

bool RaggedCall::Run(ffi::ThreadPool& threads) const {
  CopyArray(threads, pool.of_old_states);
  RaggedCall call = *this;
  call.state_length = problem.width - 1;
  return RunOnCpu(threads, call, [](auto&... operands) { return ComputeRagged(operands...); });
}

std::vector<const char*> PoolUpdateCall::Strategies() { return {JB_NAMES(kStrategyNames)}; }

Plan PoolUpdateCall::MakePlan() const { return PlanOnCpu(*this); }

bool PoolUpdateCall::Run(ffi::ThreadPool& threads) const {
  CopyArray(threads, pool.of_old_states);
  return RunOnCpu(threads, *this, [](auto&... operands) { return ComputeUpdate(operands...); });
}

}  // namespace jax_baracuda::causal_conv1d
