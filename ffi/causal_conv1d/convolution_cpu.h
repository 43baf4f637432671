// A call of a convolution on CPUs, tile by tile, and its forward pass.
//
// Work is split into tiles that fit the L1 and L2 caches: many times of one channel or, with channels last, a few times
// of a block of channels.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/causal_conv1d/tiles_cpu.h"
#include "ffi/core/alignment.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/float16_cpu.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/strategies.h"

namespace jax_baracuda::causal_conv1d {

// Tile sizes. With channels last, a tile has whole rows if possible: long contiguous reads are fastest.
inline constexpr int64_t kTimesOfChannel = 1024;  // tiles of one channel
inline constexpr int64_t kTimes = 16;             // tiles of several channels
inline constexpr int64_t kMaxChannels = 2048;
inline constexpr int64_t kMinChannels = 128;  // if there are more threads than tiles

// Sequences shorter than this are vectorised over channels, and their tiles transposed when they are loaded and stored.
inline constexpr int64_t kLongTimes = 48;

enum class Strategy {
  kNothing,         // no inputs: only states and parameter gradients are written
  kRows,            // tiles of one channel
  kTransposedRows,  // tiles of several channels, transposed
  kChannelsLast,    // tiles of several channels
};

inline constexpr const char* kStrategyNames[] = {kNothing, "rows", "transposed_rows", "channels_last"};

// With one channel or one time, both layouts are the same in memory. Vectorises over the other dimension.
inline Problem WithBestLayout(Problem problem) {
  if (problem.channels == 1) {
    problem.channels_last = false;
  } else if (problem.length == 1) {
    problem.channels_last = true;
  }
  return problem;
}

// `problem` has its best layout.
inline Strategy Choose(const Problem& problem, int64_t element_bytes) {
  if (problem.HasNoElement()) return Strategy::kNothing;
  if (problem.channels_last) return Strategy::kChannelsLast;
  const int64_t numbers_of_line = kCacheLine / std::max<int64_t>(sizeof(float), element_bytes);
  const bool is_transposed = problem.length < kLongTimes && problem.channels >= numbers_of_line;
  return is_transposed ? Strategy::kTransposedRows : Strategy::kRows;
}

// The numbers of a cache line.
template <typename C>
inline constexpr int64_t kLaneCount = kCacheLine / static_cast<int64_t>(sizeof(C));

// Channels of an example of a batch element.
struct Place {
  int64_t batch, example, channel, channels;
};

template <typename T>
class Convolution {
 public:
  using C = ComputeType<T>;

  Convolution(const ConvolutionCall& call, Strategy strategy)
      : call_(call),
        problem_(call.problem),
        is_transposed_(strategy == Strategy::kTransposedRows),
        over_times_(!problem_.channels_last && !is_transposed_) {}

  // Converts the parameters to the compute type: `width` rows of weights, then a row of biases. Each row has all
  // channels. Returns false if the allocation fails.
  bool Prepare(ffi::ThreadPool& pool) {
    const int64_t size = (problem_.width + 1) * problem_.channels;
    const bool are_shared = call_.weight.is_shared && call_.bias.is_shared;
    const int64_t filters = are_shared ? std::min<int64_t>(1, problem_.batch) : problem_.batch;
    filter_stride_ = are_shared ? 0 : size;
    filters_ = Allocate<C>(filters * size);
    if (filters_ == nullptr) return false;
    ForEachRange(pool, filters, filters * size * static_cast<int64_t>(sizeof(C)), [&](int64_t begin, int64_t end) {
      for (int64_t batch = begin; batch < end; ++batch) {
        C* const to = filters_.get() + batch * size;
        LoadParameter(call_.weight, batch, problem_.width, to);
        LoadParameter(call_.bias, batch, 1, to + problem_.width * problem_.channels);
      }
    });
    return true;
  }

  // Whether tiles have one channel and are vectorised over times.
  bool over_times() const { return over_times_; }

  int64_t tile_times() const { return over_times_ ? kTimesOfChannel : kTimes; }

  // The channels per tile, if about `num_tiles` tiles along the channels keep all threads busy.
  int64_t TileChannels(int64_t num_tiles) const {
    if (over_times_) return 1;
    const int64_t lines = CeilDivide(problem_.channels, num_tiles * kLaneCount<C>);
    return std::clamp(lines * kLaneCount<C>, kMinChannels, kMaxChannels);
  }

  int64_t reach() const { return problem_.width - 1; }
  int64_t time_stride() const { return problem_.channels_last ? problem_.channels : 1; }  // in arrays of x's shape

  // The address of the place's first channel at a time, in an array of x's shape.
  template <typename Number>
  Number* At(Number* array, bool is_shared, Place place, int64_t time) const {
    const int64_t example = Example(is_shared, place);
    return array + (problem_.channels_last ? (example * problem_.length + time) * problem_.channels + place.channel
                                           : (example * problem_.channels + place.channel) * problem_.length + time);
  }
  const T* At(const BatchOperand& operand, Place place, int64_t time) const {
    return At(static_cast<const T*>(operand.data), operand.is_shared, place, time);
  }

  // The address of the state of the place's first channel, in an array of states of `length` inputs.
  template <typename Number>
  Number* StateAt(Number* states, bool is_shared, Place place, int64_t length) const {
    return states + (Example(is_shared, place) * problem_.channels + place.channel) * length;
  }

  // The masks from `time` on; nullptr if there are none.
  const uint8_t* SameSequence(Place place, int64_t time) const {
    const auto* const masks = static_cast<const uint8_t*>(call_.same_sequence.data);
    if (masks == nullptr) return nullptr;
    return masks + Example(call_.same_sequence.is_shared, place) * problem_.length + time;
  }

  bool IsSameSequence(Place place, int64_t time, int64_t bit) const {
    const uint8_t* const mask = SameSequence(place, time);
    return mask == nullptr || (*mask >> bit & 1) != 0;
  }

  // Row k has the weights of tap k, row `width` the biases, from the place's first channel on.
  View<const C> Filter(Place place) const {
    return {filters_.get() + place.batch * filter_stride_ + place.channel, problem_.channels};
  }

  // Part of an array of x's shape as a tile: in place if possible; otherwise nullptr.
  template <typename Number>
  auto InPlace(Number* array) const {
    if constexpr (std::is_same_v<T, C>) {
      return View<Number>{is_transposed_ ? nullptr : array, time_stride()};
    } else {
      return View<std::conditional_t<std::is_const_v<Number>, const C, C>>{nullptr, 0};
    }
  }

  // `times` times of an array of x's shape as a tile, from its first element on: in place, or copied to the buffer.
  View<const C> Load(const T* from, int64_t times, int64_t channels, C* buffer) const {
    if (const View<const C> in_place = InPlace(from); in_place.data != nullptr) return in_place;
    Copy(from, times, channels, buffer);
    return {buffer, channels};
  }

  void Copy(const T* from, int64_t times, int64_t channels, C* tile) const {
    if (is_transposed_) return LoadRows(from, problem_.length, 0, times, channels, tile);
    ForEachRun(times, channels, [&](int64_t in_array, int64_t in_tile, int64_t count) {
      Widen(from + in_array, count, tile + in_tile);
    });
  }

  void Store(const C* tile, int64_t times, int64_t channels, T* to) const {
    if (is_transposed_) return StoreRows(tile, problem_.length, times, channels, to);
    ForEachRun(times, channels,
               [&](int64_t in_array, int64_t in_tile, int64_t count) { Narrow(tile + in_tile, count, to + in_array); });
  }

  // The inputs of times [begin, end).
  View<const C> Inputs(Place place, int64_t begin, int64_t end, C* buffer) const {
    const T* state = nullptr;
    if (call_.initial_state.data != nullptr) {
      state = StateAt(static_cast<const T*>(call_.initial_state.data), call_.initial_state.is_shared, place,
                      call_.state_length);
    }
    return InputsOfSequence(place, /*first=*/0, state, begin, end, buffer);
  }

  // The same for a sequence that begins at time `first`, with this state; nullptr: with zeros.
  View<const C> InputsOfSequence(Place place, int64_t first, const T* state, int64_t begin, int64_t end,
                                 C* buffer) const {
    if (begin >= first) return Load(At(call_.x, place, begin), end - begin, place.channels, buffer);
    const int64_t before = first - begin, length = call_.state_length;
    if (state == nullptr) {
      std::fill_n(buffer, before * place.channels, C{0});
    } else {
      LoadRows(state, length, length - before, before, place.channels, buffer);
    }
    if (end > first) Copy(At(call_.x, place, first), end - first, place.channels, buffer + before * place.channels);
    return {buffer, place.channels};
  }

  // z, or its silu, of `times` times from `time` on. `in` begins at the first input of the first window.
  void Forward(Place place, View<const C> in, bool silu, int64_t time, int64_t times, View<C> z) const {
    const View<const C> filter = Filter(place);
    Correlate<C>(TileOf(place, times), in, filter, filter.From(problem_.width).data,
                 {SameSequence(place, time), times, false}, silu, z);
  }

  // Replaces z of a tile by its cotangent. The buffer has the size of the tile.
  void SiluGradientOf(const T* d_output, int64_t times, int64_t channels, C* buffer, C* z) const {
    if (is_transposed_) {
      Copy(d_output, times, channels, buffer);
      return SiluGradient(buffer, times * channels, z);
    }
    ForEachRun(times, channels, [&](int64_t in_array, int64_t in_tile, int64_t count) {
      SiluGradient(d_output + in_array, count, z + in_tile);
    });
  }

  // dx of `times` times from `time` on, without the contribution of the final state. `dz` begins at `time` too: it has
  // `gradients` times, then zeros up to the end of the last window.
  void Transpose(Place place, const C* dz, int64_t time, int64_t gradients, int64_t times, View<C> dx) const {
    static constexpr C kZeros[kMaxChannels] = {};
    const View<const C> reversed{Filter(place).From(reach()).data, -problem_.channels};
    Correlate<C>(TileOf(place, times), {dz, place.channels}, reversed, kZeros,
                 {SameSequence(place, time), gradients, true}, /*silu=*/false, dx);
  }

  // Adds to the sums for the weights and the bias: one row of all channels per tap, then one for the bias.
  void SumProducts(Place place, View<const C> in, const C* dz, int64_t time, int64_t times, double* sums) const {
    causal_conv1d::SumProducts<C>(TileOf(place, times), in, dz, {SameSequence(place, time), times, false},
                                  {sums + place.channel, problem_.channels});
  }

 private:
  int64_t Example(bool is_shared, Place place) const {
    return (is_shared ? 0 : place.batch) * problem_.examples + place.example;
  }

  Tile TileOf(Place place, int64_t times) const { return {problem_.width, over_times_, times, place.channels}; }

  // Calls body(offset in an array of x's shape, offset in a tile, count) for the runs of numbers that are consecutive in
  // both.
  template <typename Body>
  void ForEachRun(int64_t times, int64_t channels, const Body& body) const {
    if (channels == problem_.channels || over_times_) return body(int64_t{0}, int64_t{0}, times * channels);
    for (int64_t time = 0; time < times; ++time) body(time * problem_.channels, time * channels, channels);
  }

  // `count` numbers per channel as `count` rows; zeros if the operand is absent.
  void LoadParameter(const Parameter& parameter, int64_t batch, int64_t count, C* to) const {
    const int64_t first = parameter.is_shared ? 0 : batch * problem_.channels * count;
    const auto load = [&](const auto* numbers) { LoadRows(numbers + first, count, 0, count, problem_.channels, to); };
    if (parameter.data == nullptr) {
      std::fill_n(to, count * problem_.channels, C{0});
    } else if (parameter.type == call_.type) {
      load(static_cast<const T*>(parameter.data));
    } else {
      load(static_cast<const C*>(parameter.data));
    }
  }

  const ConvolutionCall& call_;
  const Problem& problem_;
  const bool is_transposed_;  // whether tiles are transposed relative to arrays of x's shape
  const bool over_times_;
  Memory<C> filters_;
  int64_t filter_stride_ = 0;
};

// Computes y of `times` times from `time` on. `in` begins at the first input of the first window. The buffer has room for
// a tile.
template <typename T, typename C = ComputeType<T>>
void WriteTile(const OutputCall& call, const Convolution<T>& convolution, Place place, View<const C> in, int64_t time,
               int64_t times, C* buffer) {
  T* const y = convolution.At(static_cast<T*>(call.y), /*is_shared=*/false, place, time);
  View<C> out = convolution.InPlace(y);
  const bool is_in_place = out.data != nullptr;
  if (!is_in_place) out = {buffer, place.channels};
  convolution.Forward(place, in, call.problem.silu, time, times, out);
  if (!is_in_place) convolution.Store(out.data, times, place.channels, y);
}

// The forward pass. It returns false if an allocation fails, as the other passes do.
template <typename T>
bool ComputeForward(ffi::ThreadPool& pool, const OutputCall& call, const Convolution<T>& convolution) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  if (problem.HasNoElement()) return true;
  const int64_t tile_times = convolution.tile_times(), tile_channels = convolution.TileChannels(/*num_tiles=*/1);
  const int64_t time_tiles = CeilDivide(problem.length, tile_times);
  const int64_t channel_tiles = CeilDivide(problem.channels, tile_channels);
  const int64_t tiles_of_example = time_tiles * channel_tiles;
  const int64_t bytes =
      problem.batch * problem.examples * problem.channels * problem.length * static_cast<int64_t>(sizeof(T));
  std::atomic<bool> has_memory{true};
  ForEachRange(pool, problem.batch * problem.examples * tiles_of_example, bytes, [&](int64_t begin, int64_t end) {
    const int64_t window = tile_times + convolution.reach();
    const auto memory = Allocate<C>((window + tile_times) * tile_channels);
    if (memory == nullptr) {
      has_memory = false;
      return;
    }
    for (int64_t tile = begin; tile < end; ++tile) {  // in memory order
      const int64_t example = tile / tiles_of_example, in_example = tile % tiles_of_example;
      const bool over_times = convolution.over_times();
      const int64_t time = tile_times * (over_times ? in_example % time_tiles : in_example / channel_tiles);
      const int64_t channel = tile_channels * (over_times ? in_example / time_tiles : in_example % channel_tiles);
      const int64_t times = std::min(tile_times, problem.length - time);
      const Place place{example / problem.examples, example % problem.examples, channel,
                        std::min(tile_channels, problem.channels - channel)};
      const auto in = convolution.Inputs(place, time - convolution.reach(), time + times, memory.get());
      WriteTile(call, convolution, place, in, time, times, memory.get() + window * tile_channels);
    }
  });
  return has_memory;
}

// Calls compute(pool, call, convolution) with the types of a call.
template <typename Call, typename Compute>
bool RunOnCpu(ffi::ThreadPool& pool, Call call, const Compute& compute) {
  call.problem = WithBestLayout(call.problem);
  const Strategy strategy = Choose(call.problem, ElementBytes(call.type));
  return DispatchOr(true, call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    Convolution<typename decltype(tag)::type> convolution(call, strategy);
    return convolution.Prepare(pool) && compute(pool, call, convolution);
  });
}

inline Plan PlanOnCpu(const ConvolutionCall& call) {
  return {NameOf(kStrategyNames, Choose(WithBestLayout(call.problem), ElementBytes(call.type)))};
}

}  // namespace jax_baracuda::causal_conv1d
