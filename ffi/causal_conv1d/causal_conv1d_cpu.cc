// causal_conv1d, its gradient and its update on CPUs.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/causal_conv1d/convolution_cpu.h"
#include "ffi/causal_conv1d/tiles_cpu.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"

namespace jax_baracuda::causal_conv1d {
namespace {

// Chunks of the sums over examples and times. They depend only on shapes, so that the results are the same for any
// number of threads.
constexpr int64_t kChunkTimesOfChannel = 8 * kTimesOfChannel;
constexpr int64_t kChunkTimes = 16 * kTimes;
constexpr int64_t kMaxParts = 128;  // limits parts * batch size * channels in units of the smallest tile

// ---------------------------------------------------------------------------------------------------------------------
// The backward pass.

template <typename T>
class Backward {
 public:
  using C = ComputeType<T>;

  Backward(const BackwardCall& call, const Convolution<T>& convolution)
      : call_(call), problem_(call.problem), convolution_(convolution) {}

  // For tiles of up to `channels` channels. Returns false if the allocation fails.
  bool Allocate(int64_t channels) {
    const int64_t times = convolution_.tile_times(), reach = convolution_.reach();
    memory_ = jax_baracuda::Allocate<C>((reach + times + reach + times + reach + times + reach) * channels);
    if (memory_ == nullptr) return false;
    inputs_ = memory_.get();
    dz_ = inputs_ + (reach + times + reach) * channels;
    dx_ = dz_ + (times + reach) * channels;
    return true;
  }

  // Writes dx of times [begin, end), and adds the contributions of these times to the sums.
  void Run(Place place, int64_t begin, int64_t end, double* sums) {
    const int64_t reach = convolution_.reach(), channels = place.channels;
    int64_t known = 0;  // the number of times of dz, from the tile's first on, that the previous tile computed
    for (int64_t time = begin; time < end; time += convolution_.tile_times()) {
      const int64_t times = std::min(convolution_.tile_times(), end - time);
      const int64_t wanted = std::min(times + reach, problem_.length - time), missing = wanted - known;
      const View<const C> in = convolution_.Inputs(place, time - reach, time + wanted, inputs_);
      C* const next = dz_ + known * channels;
      const T* const d_output = convolution_.At(call_.d_output, place, time + known);
      if (problem_.silu) {
        convolution_.Forward(place, in.From(known), /*silu=*/false, time + known, missing, {next, channels});
        convolution_.SiluGradientOf(d_output, missing, channels, dx_, next);
      } else {
        convolution_.Copy(d_output, missing, channels, next);
      }
      std::fill(dz_ + wanted * channels, dz_ + (times + reach) * channels, C{0});
      convolution_.SumProducts(place, in, dz_, time, times, sums);
      T* const to = convolution_.At(static_cast<T*>(call_.dx), /*is_shared=*/false, place, time);
      View<C> dx = convolution_.InPlace(to);
      const bool is_in_place = dx.data != nullptr;
      if (!is_in_place) dx = {dx_, channels};
      convolution_.Transpose(place, dz_, time, wanted, times, dx);
      AddFinalState(place, time, times, dx);
      if (!is_in_place) convolution_.Store(dx_, times, channels, to);
      if (time == 0) WriteInitialState(place, wanted);
      known = std::max<int64_t>(wanted - times, 0);
      std::copy_n(dz_ + times * channels, known * channels, dz_);
    }
  }

  // Writes d_initial_state from dz of the first `gradients` times: all times, or all whose windows include the state.
  void WriteInitialState(Place place, int64_t gradients) const {
    if (call_.d_initial_state == nullptr) return;
    const int64_t reach = convolution_.reach();
    T* to = convolution_.StateAt(static_cast<T*>(call_.d_initial_state), /*is_shared=*/false, place, reach);
    for (int64_t c = 0; c < place.channels; ++c) {
      for (int64_t time = -reach; time < 0; ++time, ++to) {
        C sum = FinalState(place, c, time);
        for (int64_t bit = -time; bit <= reach && time + bit < gradients; ++bit) {
          if (!convolution_.IsSameSequence(place, time + bit, bit)) continue;
          sum += convolution_.Filter(place).From(reach - bit).data[c] * dz_[(time + bit) * place.channels + c];
        }
        Store(sum, to);
      }
    }
  }

 private:
  // The contribution of d_final_state to dx, or d_initial_state, at a time.
  C FinalState(Place place, int64_t c, int64_t time) const {
    const int64_t reach = convolution_.reach(), i = time - (problem_.length - reach);
    if (call_.d_final_state.data == nullptr || i < 0) return C{0};
    if (problem_.length > 0 && !convolution_.IsSameSequence(place, problem_.length - 1, reach - 1 - i)) return C{0};
    const auto* const states = static_cast<const T*>(call_.d_final_state.data);
    return static_cast<C>(convolution_.StateAt(states, call_.d_final_state.is_shared, place, reach)[c * reach + i]);
  }

  void AddFinalState(Place place, int64_t time, int64_t times, View<C> dx) const {
    if (call_.d_final_state.data == nullptr) return;
    for (int64_t t = std::max(time, problem_.length - convolution_.reach()); t < time + times; ++t) {
      for (int64_t c = 0; c < place.channels; ++c) dx.From(t - time).data[c] += FinalState(place, c, t);
    }
  }

  const BackwardCall& call_;
  const Problem& problem_;
  const Convolution<T>& convolution_;
  Memory<C> memory_;
  C* inputs_ = nullptr;
  C* dz_ = nullptr;
  C* dx_ = nullptr;  // also a buffer for d_output
};

// Computes dweight and dbias from the partial sums [part, batch, width + 1, channels].
template <typename C>
void WriteParameterGradients(ffi::ThreadPool& pool, const Problem& problem, int64_t parts, const double* sums,
                             C* dweight, C* dbias) {
  const int64_t rows = problem.batch * problem.channels, width = problem.width;
  const int64_t part_stride = rows * (width + 1);
  ForEachRange(pool, rows, parts * part_stride * static_cast<int64_t>(sizeof(double)),
               [&](int64_t row_begin, int64_t row_end) {
                 for (int64_t row = row_begin; row < row_end; ++row) {
                   const int64_t g = row / problem.channels, c = row % problem.channels;
                   for (int64_t k = 0; k <= width; ++k) {
                     const double* const first = sums + (g * (width + 1) + k) * problem.channels + c;
                     double sum = 0;
                     for (int64_t part = 0; part < parts; ++part) sum += first[part * part_stride];
                     (k < width ? dweight[row * width + k] : dbias[row]) = static_cast<C>(sum);
                   }
                 }
               });
}

template <typename T>
bool ComputeBackward(ffi::ThreadPool& pool, const BackwardCall& call, const Convolution<T>& convolution) {
  const Problem& problem = call.problem;
  if (problem.batch == 0 || problem.channels == 0) return true;
  const int64_t bytes =
      problem.batch * problem.examples * problem.channels * problem.length * static_cast<int64_t>(sizeof(T));
  // A chunk is a range of times of an example. Chunks are grouped into parts. Each part has its own sums, and its
  // chunks are added in order. The split of channels among threads does not affect the sums.
  const int64_t chunk_times = convolution.over_times() ? kChunkTimesOfChannel : kChunkTimes;
  const int64_t chunks_of_example = std::max<int64_t>(1, CeilDivide(problem.length, chunk_times));
  const int64_t chunks = problem.examples * chunks_of_example;
  const int64_t units = CeilDivide(problem.channels, convolution.over_times() ? 1 : kMinChannels);
  const int64_t parts = std::clamp<int64_t>(kMaxParts / (problem.batch * units), 1, std::max<int64_t>(1, chunks));
  const int64_t tile_channels = convolution.TileChannels(CeilDivide(4 * NumThreadsOf(pool), problem.batch * parts));
  const int64_t channel_tiles = CeilDivide(problem.channels, tile_channels);
  const int64_t sums_of_part = (problem.width + 1) * problem.channels;  // and batch element
  const std::unique_ptr<double[]> sums(new (std::nothrow) double[parts * problem.batch * sums_of_part]());
  if (sums == nullptr) return false;
  std::atomic<bool> has_memory{true};
  ForEachRange(pool, problem.batch * parts * channel_tiles, 2 * bytes, [&](int64_t begin, int64_t end) {
    Backward<T> backward(call, convolution);
    if (!backward.Allocate(tile_channels)) {
      has_memory = false;
      return;
    }
    while (begin < end) {
      const int64_t row = begin / channel_tiles, batch = row / parts, part = row % parts;
      const int64_t first_tile = begin % channel_tiles;
      const int64_t end_tile = std::min(channel_tiles, first_tile + end - begin);
      for (int64_t chunk = ChunkBegin(chunks, parts, part); chunk < ChunkBegin(chunks, parts, part + 1); ++chunk) {
        const int64_t time = chunk % chunks_of_example * chunk_times;
        for (int64_t tile = first_tile; tile < end_tile; ++tile) {
          const int64_t channel = tile * tile_channels;
          const Place place{batch, chunk / chunks_of_example, channel,
                            std::min(tile_channels, problem.channels - channel)};
          backward.Run(place, time, std::min(time + chunk_times, problem.length),
                       sums.get() + (part * problem.batch + batch) * sums_of_part);
          if (problem.length == 0) backward.WriteInitialState(place, 0);
        }
      }
      begin += end_tile - first_tile;
    }
  });
  if (!has_memory) return false;
  WriteParameterGradients(pool, problem, parts, sums.get(), static_cast<ComputeType<T>*>(call.dweight),
                          static_cast<ComputeType<T>*>(call.dbias));
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// The update.

template <typename T>
bool ComputeUpdate(ffi::ThreadPool& pool, const UpdateCall& call, const Convolution<T>& convolution) {
  if (!ComputeForward(pool, call, convolution)) return false;
  // The new state: the last `length` inputs of the old state followed by x. It is written last, because it may be in the
  // memory of the old state.
  const Problem& problem = call.problem;
  const int64_t length = call.state_length, kept = std::max<int64_t>(0, length - problem.length);
  const int64_t rows = problem.batch * problem.examples * problem.channels;
  const bool shifts = problem.length == 1 && problem.channels_last && length >= 1 && length <= kMaxWidth;
  ForEachRange(pool, rows, rows * length * static_cast<int64_t>(sizeof(T)), [&](int64_t row_begin, int64_t row_end) {
    for (int64_t row = row_begin; row < row_end;) {
      const int64_t example = row / problem.channels, channel = row % problem.channels;
      const int64_t channels = shifts ? std::min(problem.channels - channel, row_end - row) : 1;
      const Place place{example / problem.examples, example % problem.examples, channel, channels};
      const T* const old = convolution.StateAt(static_cast<const T*>(call.initial_state.data),
                                               call.initial_state.is_shared, place, length);
      const T* const x = convolution.At(call.x, place, problem.length - (length - kept));
      T* const to = static_cast<T*>(call.new_state) + row * length;
      if (shifts) {
        ShiftStates(old, length, x, channels, to);
      } else {
        std::memmove(static_cast<void*>(to), old + (length - kept), static_cast<size_t>(kept) * sizeof(T));
        for (int64_t i = kept; i < length; ++i) to[i] = x[(i - kept) * convolution.time_stride()];
      }
      row += channels;
    }
  });
  return true;
}

}  // namespace

std::vector<const char*> ForwardCall::Strategies() { return {JB_NAMES(kStrategyNames)}; }
std::vector<const char*> BackwardCall::Strategies() { return {JB_NAMES(kStrategyNames)}; }
std::vector<const char*> UpdateCall::Strategies() { return {JB_NAMES(kStrategyNames)}; }

Plan ForwardCall::MakePlan() const { return PlanOnCpu(*this); }
Plan BackwardCall::MakePlan() const { return PlanOnCpu(*this); }
Plan UpdateCall::MakePlan() const { return PlanOnCpu(*this); }

bool ForwardCall::Run(ffi::ThreadPool& pool) const {
  return RunOnCpu(pool, *this, [](auto&... operands) { return ComputeForward(operands...); });
}

bool BackwardCall::Run(ffi::ThreadPool& pool) const {
  return RunOnCpu(pool, *this, [](auto&... operands) { return ComputeBackward(operands...); });
}

bool UpdateCall::Run(ffi::ThreadPool& pool) const {
  return RunOnCpu(pool, *this, [](auto&... operands) { return ComputeUpdate(operands...); });
}

}  // namespace jax_baracuda::causal_conv1d
