// The CPU kernels of causal_conv1d, its gradient and its update.
//
// Work is split into tiles that fit the L1 and L2 caches. A tile holds numbers of the compute type as [times,
// channels]. The strategies differ in the tiles:
//   rows: many times of one channel. Loops are vectorised over the times.
//   channels_last: a few times of many channels. Loops are vectorised over the channels.
//   transposed_rows: the same for short rows. Tiles are transposed when they are loaded and stored.
//
// The convolution and its transpose are the same correlation over a window of times. A tile is first computed as if all
// its inputs belonged to one sequence. The few times whose windows reach into another sequence (borders) are then
// computed again, tap by tap.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/causal_conv1d/causal_conv1d_handler.h"
#include "ffi/core/alignment.h"
#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/exp_cpu.h"
#include "ffi/core/float16_cpu.h"
#include "ffi/core/huge_pages.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/strategies.h"
#include "ffi/core/target_table.h"

namespace jax_baracuda::causal_conv1d {
namespace {

constexpr int64_t kLineBytes = 64;  // a cache line, and the longest vector register

// Tile sizes. With channels last, a tile has whole rows if possible: long contiguous reads are fastest.
constexpr int64_t kTimesOfChannel = 1024;  // tiles of one channel
constexpr int64_t kTimes = 16;             // tiles of several channels
constexpr int64_t kMaxChannels = 2048;
constexpr int64_t kMinChannels = 128;  // if there are more threads than tiles

// Sequences shorter than this are vectorised over channels.
constexpr int64_t kLongTimes = 48;

// Chunks of the sums over examples and times. They depend only on shapes, so that the results are the same for any
// number of threads.
constexpr int64_t kTilesOfChunk = 16;
constexpr int64_t kMaxParts = 128;  // limits parts * batch size * channels in units of the smallest tile

enum class Strategy {
  kNothing,  // no inputs: only states and parameter gradients are written
  kRows,
  kTransposedRows,
  kChannelsLast,
};

constexpr const char* kStrategyNames[] = {"nothing", "rows", "transposed_rows", "channels_last"};

// With one channel or one time, both layouts are the same in memory. Vectorises over the other dimension.
Problem WithBestLayout(Problem problem) {
  if (problem.channels == 1) {
    problem.channels_last = false;
  } else if (problem.length == 1) {
    problem.channels_last = true;
  }
  return problem;
}

// `problem` has its best layout.
Strategy Choose(const Problem& problem, int64_t element_bytes) {
  if (problem.HasNoElement()) return Strategy::kNothing;
  if (problem.channels_last) return Strategy::kChannelsLast;
  const int64_t numbers_of_line = kLineBytes / std::max<int64_t>(sizeof(float), element_bytes);
  const bool is_transposed = problem.length < kLongTimes && problem.channels >= numbers_of_line;
  return is_transposed ? Strategy::kTransposedRows : Strategy::kRows;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels.

// Numbers [times, channels] with `stride` numbers from one time to the next.
template <typename C>
struct View {
  C* data;
  int64_t stride;

  View From(int64_t time) const { return {data + time * stride, stride}; }
};

// The numbers of one 64-byte vector register, or of several shorter ones.
template <typename C>
struct Lanes {
  static constexpr int64_t kCount = kLineBytes / sizeof(C);
  typedef C Type __attribute__((vector_size(kLineBytes)));
};

template <typename C>
JB_INLINE C Silu(C z) {
  return z / (C{1} + ExpOrZero(-z));
}

// Replaces z by its cotangent.
template <typename T, typename C>
JB_CPU_CLONES void SiluGradient(const T* dy, int64_t count, C* z) {
  ForEachPart(dy, count, [&](int64_t begin, int64_t part, const auto* numbers) __attribute__((always_inline)) {
    JB_VECTORIZE
    for (int64_t i = 0; i < part; ++i) {
      const C number = z[begin + i], exponential = ExpOrZero(-number), sigmoid = C{1} / (C{1} + exponential);
      const C of_negative = number < C{0} ? C{1} - sigmoid : exponential * sigmoid;  // sigmoid(-z)
      z[begin + i] = static_cast<C>(numbers[i]) * (sigmoid * (C{1} + number * of_negative));
    }
  });
}

// Calls body with the length, as a compile-time constant if it is that of the usual filters and states.
template <typename Body>
void WithLength(int64_t length, const Body& body) {
  if (!DispatchConstant<1, 2, 3, 4>(length, body)) body(length);
}

// Transposes the first `times` numbers of each channel's row of `length` numbers to [times, channels].
template <typename Length, typename T, typename C>
JB_CPU_CLONES void LoadColumns(const T* rows, Length length, int64_t times, int64_t channels, C* to) {
  for (int64_t time = 0; time < times; ++time, ++rows, to += channels) {
    JB_VECTORIZE
    for (int64_t c = 0; c < channels; ++c) to[c] = static_cast<C>(rows[c * length]);
  }
}

// The reverse.
template <typename Length, typename T, typename C>
JB_CPU_CLONES void StoreColumns(const C* from, Length length, Length times, int64_t channels, T* rows) {
  JB_VECTORIZE
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t time = 0; time < times; ++time) Store(from[time * channels + c], rows + c * length + time);
  }
}

// Writes the newest `length` inputs of each old state followed by x. x has `inputs` numbers per channel, at most
// `length`. `new_states` may alias `old_states`.
template <typename Length, typename Inputs, typename T>
JB_CPU_CLONES void ShiftStates(const T* old_states, Length length, const T* x, Inputs inputs, Inputs channel_stride,
                               int64_t time_stride, int64_t channels, T* new_states) {
  JB_VECTORIZE
  for (int64_t c = 0; c < channels; ++c) {
    T* const to = new_states + c * length;
    for (int64_t i = inputs; i < length; ++i) to[i - inputs] = old_states[c * length + i];
    for (int64_t i = 0; i < inputs; ++i) to[length - inputs + i] = x[c * channel_stride + i * time_stride];
  }
}

// out[t, c] = biases[c] + sum over k < kWidth of weights[k, c] * in[t + k, c], or its silu.
template <int kWidth, bool kOverTimes, bool kSilu, typename C>
JB_CPU_CLONES void Correlate(const C* __restrict in, int64_t in_stride, const C* __restrict weights,
                             int64_t weight_stride, const C* __restrict biases, int64_t times, int64_t channels,
                             C* __restrict out, int64_t out_stride) {
  const auto run = [&](auto count, int64_t t) __attribute__((always_inline)) {
    constexpr int kRows = count;
    const int64_t columns = kOverTimes ? times : channels, tap_stride = kOverTimes ? 1 : in_stride;
    const C* const from = in + t * in_stride;
    C* const to = out + t * out_stride;
    JB_VECTORIZE
    for (int64_t i = 0; i < columns; ++i) {
      C window[kRows + kWidth - 1];
      for (int k = 0; k < kRows + kWidth - 1; ++k) window[k] = from[k * tap_stride + i];
      for (int row = 0; row < kRows; ++row) {
        C sum = biases[kOverTimes ? 0 : i];
        for (int k = 0; k < kWidth; ++k) sum += weights[k * weight_stride + (kOverTimes ? 0 : i)] * window[row + k];
        to[row * out_stride + i] = kSilu ? Silu(sum) : sum;
      }
    }
  };
  if constexpr (kOverTimes) return run(std::integral_constant<int, 1>{}, 0);
  constexpr int kMaxRows = 4;  // several times together reuse loaded inputs and weights
  int64_t t = 0;
  for (; t + kMaxRows <= times; t += kMaxRows) run(std::integral_constant<int, kMaxRows>{}, t);
  for (; t < times; ++t) run(std::integral_constant<int, 1>{}, t);
}

// The same for one time and those taps whose bits are set.
template <typename C>
JB_CPU_CLONES void CorrelateTaps(int taps, View<const C> in, View<const C> weights, const C* biases, bool silu,
                                 int64_t channels, C* out) {
  JB_VECTORIZE
  for (int64_t c = 0; c < channels; ++c) out[c] = biases[c];
  for (int k = 0; taps >> k != 0; ++k) {
    if ((taps >> k & 1) == 0) continue;
    const C *const from = in.From(k).data, *const weights_of_tap = weights.From(k).data;
    JB_VECTORIZE
    for (int64_t c = 0; c < channels; ++c) out[c] += weights_of_tap[c] * from[c];
  }
  if (!silu) return;
  JB_VECTORIZE
  for (int64_t c = 0; c < channels; ++c) out[c] = Silu(out[c]);
}

// Adds the sum over t of dz[t, c] * in[t + k, c] to sums[k, c], and the sum of dz to sums[kWidth, c]. dz has no gaps.
// The order of the sums is fixed.
template <int kWidth, bool kOverTimes, typename C>
JB_CPU_CLONES void SumProducts(View<const C> in, const C* dz, int64_t times, int64_t channels, View<double> sums) {
  // Adds up `count` vectors of products. The first vector begins at a number of the first time.
  const auto add = [&](auto tag, int64_t first, int64_t count) __attribute__((always_inline)) {
    using Vector = typename decltype(tag)::type;
    constexpr int64_t kLanes = sizeof(Vector) / sizeof(C);
    Vector products[kWidth + 1] = {};
    for (int64_t i = 0; i < count; ++i) {
      Vector gradient, input;
      std::memcpy(&gradient, dz + first + i * (kOverTimes ? kLanes : channels), sizeof(Vector));
      products[kWidth] += gradient;
      for (int k = 0; k < kWidth; ++k) {
        std::memcpy(&input, in.data + first + (kOverTimes ? i * kLanes + k : (i + k) * in.stride), sizeof(Vector));
        products[k] += gradient * input;
      }
    }
    for (int k = 0; k <= kWidth; ++k) {
      C lanes[kLanes];
      std::memcpy(lanes, &products[k], sizeof(Vector));
      if constexpr (kOverTimes) {
        for (int64_t half = kLanes / 2; half > 0; half /= 2) {
          for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[half + lane];
        }
      }
      double* const to = sums.From(k).data + (kOverTimes ? 0 : first);
      for (int64_t lane = 0; lane < (kOverTimes ? 1 : kLanes); ++lane) to[lane] += static_cast<double>(lanes[lane]);
    }
  };
  constexpr int64_t kLanes = Lanes<C>::kCount;
  const int64_t columns = kOverTimes ? times : channels, whole = columns / kLanes * kLanes;
  if constexpr (kOverTimes) {
    add(TypeTag<typename Lanes<C>::Type>{}, 0, whole / kLanes);
    if (whole < columns) add(TypeTag<C>{}, whole, columns - whole);
  } else {
    for (int64_t c = 0; c < whole; c += kLanes) add(TypeTag<typename Lanes<C>::Type>{}, c, times);
    for (int64_t c = whole; c < columns; ++c) add(TypeTag<C>{}, c, times);
  }
}

// The same for one time and those taps whose bits are set. The sums of dz are in row `width`.
template <typename C>
JB_CPU_CLONES void SumTaps(int taps, View<const C> in, const C* dz, int width, int64_t channels, View<double> sums) {
  for (int k = 0; k <= width; ++k) {
    if (k < width && (taps >> k & 1) == 0) continue;
    const C* const from = in.From(k).data;
    double* const to = sums.From(k).data;
    JB_VECTORIZE
    for (int64_t c = 0; c < channels; ++c) to[c] += static_cast<double>(k < width ? dz[c] * from[c] : dz[c]);
  }
}

// The index of the first byte that is not `value`, or `count`.
inline int64_t FirstOther(const uint8_t* bytes, int64_t count, uint8_t value) {
  const uint64_t values = value * uint64_t{0x0101010101010101};
  int64_t i = 0;
  for (uint64_t word; i + 8 <= count; i += 8) {
    std::memcpy(&word, bytes + i, sizeof(word));
    if (word != values) break;
  }
  while (i < count && bytes[i] == value) ++i;
  return i;
}

// Uninitialised memory, aligned to a cache line. Vectors that cross lines are up to 1.5 times slower.
template <typename C>
class Lines {
 public:
  // Returns false if the allocation fails.
  bool Allocate(int64_t count) {
    memory_ = jax_baracuda::Allocate<C>(count + Lanes<C>::kCount);
    return memory_ != nullptr;
  }

  C* get() const { return AlignUp(memory_.get(), kLineBytes); }

 private:
  std::unique_ptr<C[]> memory_;
};

// ---------------------------------------------------------------------------------------------------------------------
// A call, tile by tile.

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
        transposes_tiles_(strategy == Strategy::kTransposedRows),
        over_times_(!problem_.channels_last && !transposes_tiles_) {}

  // Converts the parameters to the compute type: `width` rows of weights, then a row of biases. Each row has all
  // channels. Returns false if the allocation fails.
  bool Prepare(ffi::ThreadPool& pool) {
    const int64_t size = (problem_.width + 1) * problem_.channels;
    const bool are_shared = call_.weight.is_shared && (call_.bias.data == nullptr || call_.bias.is_shared);
    const int64_t filters = are_shared ? std::min<int64_t>(1, problem_.batch) : problem_.batch;
    filter_stride_ = are_shared ? 0 : size;
    if (!filters_.Allocate(filters * size)) return false;
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
    const int64_t lines = CeilDivide(problem_.channels, num_tiles * Lanes<C>::kCount);
    return std::clamp(lines * Lanes<C>::kCount, kMinChannels, kMaxChannels);
  }

  int64_t reach() const { return problem_.width - 1; }

  // Strides of arrays of x's shape.
  int64_t time_stride() const { return problem_.channels_last ? problem_.channels : 1; }
  int64_t channel_stride() const { return problem_.channels_last ? 1 : problem_.length; }

  // The address of the place's first channel at a time, in an array of x's shape.
  template <typename Number>
  Number* At(Number* array, bool is_shared, Place place, int64_t time) const {
    return array + Example(is_shared, place) * problem_.channels * problem_.length + place.channel * channel_stride() +
           time * time_stride();
  }
  const T* At(const Operand& operand, Place place, int64_t time) const {
    return At(static_cast<const T*>(operand.data), operand.is_shared, place, time);
  }

  // The address of the state of the place's first channel, in an array of states of `length` inputs.
  template <typename Number>
  Number* StateAt(Number* states, bool is_shared, Place place, int64_t length) const {
    return states + (Example(is_shared, place) * problem_.channels + place.channel) * length;
  }
  const T* StateAt(const Operand& operand, Place place, int64_t length) const {
    return StateAt(static_cast<const T*>(operand.data), operand.is_shared, place, length);
  }

  bool IsSameSequence(Place place, int64_t time, int64_t bit) const {
    const uint8_t* const masks = Masks(place, time);
    return masks == nullptr || (*masks >> bit & 1) != 0;
  }

  // Row k has the weights of tap k, row `width` the biases, from the place's first channel on.
  View<const C> Filter(Place place) const {
    return {filters_.get() + place.batch * filter_stride_ + place.channel, problem_.channels};
  }

  // Copies part of an array of x's shape to a tile without gaps.
  void Load(const T* from, int64_t times, int64_t channels, C* tile) const {
    if (transposes_tiles_) return LoadRows(from, problem_.length, times, channels, tile);
    ForEachRun(times, channels, [&](int64_t in_array, int64_t in_tile, int64_t count) {
      Widen(from + in_array, count, tile + in_tile);
    });
  }

  // The tile in which to compute part of a result: in place if possible, otherwise the buffer.
  View<C> ResultTile(T* to, int64_t channels, C* buffer) const {
    if constexpr (std::is_same_v<T, C>) {
      if (!transposes_tiles_) return {to, time_stride()};
    }
    return {buffer, channels};
  }

  // Stores such a tile, unless it is in place.
  void Store(View<C> tile, int64_t times, int64_t channels, T* to) const {
    if (static_cast<const void*>(tile.data) == to) return;
    if (!transposes_tiles_) {
      return ForEachRun(times, channels, [&](int64_t in_array, int64_t in_tile, int64_t count) {
        Narrow(tile.data + in_tile, count, to + in_array);
      });
    }
    if (times < problem_.length) return StoreColumns(tile.data, problem_.length, times, channels, to);
    WithLength(times, [&](auto length) { StoreColumns(tile.data, length, length, channels, to); });
  }

  // The inputs of times [begin, end): in place, or copied to the buffer.
  View<const C> Inputs(Place place, int64_t begin, int64_t end, C* buffer) const {
    if constexpr (std::is_same_v<T, C>) {
      if (begin >= 0 && !transposes_tiles_) return {At(call_.x, place, begin), time_stride()};
    }
    C* to = buffer;
    if (begin < 0) {
      if (call_.initial_state.data == nullptr) {
        std::fill_n(to, -begin * place.channels, C{0});
      } else {
        const int64_t length = call_.state_length;
        LoadRows(StateAt(call_.initial_state, place, length) + length + begin, length, -begin, place.channels, to);
      }
      to -= begin * place.channels;
      begin = 0;
    }
    if (end > begin) Load(At(call_.x, place, begin), end - begin, place.channels, to);
    return {buffer, place.channels};
  }

  // z, or its silu, of `times` times from `time` on. `in` begins at the first input of the first window.
  void Forward(Place place, View<const C> in, bool silu, int64_t time, int64_t times, View<C> z) const {
    const View<const C> filter = Filter(place);
    Correlate(place, in, filter, filter.From(problem_.width).data, /*is_transposed=*/false, silu, time, times, z);
  }

  // Replaces z of a tile without gaps by its cotangent. The buffer has the size of the tile.
  void SiluGradientOf(const T* dy, int64_t times, int64_t channels, C* buffer, C* z) const {
    if (transposes_tiles_) {
      Load(dy, times, channels, buffer);
      return SiluGradient(buffer, times * channels, z);
    }
    ForEachRun(times, channels, [&](int64_t in_array, int64_t in_tile, int64_t count) {
      SiluGradient(dy + in_array, count, z + in_tile);
    });
  }

  // dx of `times` times from `time` on, without the contribution of the final state. `dz` begins at `time` too. After
  // the end of the sequence it has zeros, up to the end of the last window.
  void Transpose(Place place, const C* dz, int64_t time, int64_t times, View<C> dx) const {
    static constexpr C kZeros[kMaxChannels] = {};
    const View<const C> reversed{Filter(place).From(reach()).data, -problem_.channels};
    Correlate(place, {dz, place.channels}, reversed, kZeros, /*is_transposed=*/true, /*silu=*/false, time, times, dx);
  }

  // Adds to the sums for the weights and the bias: one row of all channels per tap, then one for the bias.
  void SumProducts(Place place, View<const C> in, const C* dz, int64_t time, int64_t times, double* sums) const {
    const View<double> rows{sums + place.channel, problem_.channels};
    int64_t begin = 0;
    const auto sum_until = [&](int64_t end) {
      if (begin == end) return;
      WithWidth([&](auto width, auto over_times) {
        causal_conv1d::SumProducts<width, over_times>(in.From(begin), dz + begin * place.channels, end - begin,
                                                      place.channels, rows);
      });
    };
    ForEachBorder(place, /*is_transposed=*/false, time, times, [&](int64_t t, int taps) {
      sum_until(t);
      SumTaps(taps, in.From(t), dz + t * place.channels, problem_.width, place.channels, rows);
      begin = t + 1;
    });
    sum_until(times);
  }

 private:
  int64_t Example(bool is_shared, Place place) const {
    return (is_shared ? 0 : place.batch) * problem_.examples + place.example;
  }

  // The masks of same_sequence from `time` on; nullptr if there are none.
  const uint8_t* Masks(Place place, int64_t time) const {
    const auto* const masks = static_cast<const uint8_t*>(call_.same_sequence.data);
    return masks == nullptr ? nullptr : masks + Example(call_.same_sequence.is_shared, place) * problem_.length + time;
  }

  // Calls body with the width and over_times() as compile-time constants.
  template <typename Body>
  void WithWidth(const Body& body) const {
    DispatchConstant<1, 2, 3, 4, 5, 6, 7, 8>(problem_.width, [&](auto width) {
      over_times_ ? body(width, std::true_type{}) : body(width, std::false_type{});
    });
  }

  void Correlate(Place place, View<const C> in, View<const C> weights, const C* biases, bool is_transposed, bool silu,
                 int64_t time, int64_t times, View<C> out) const {
    WithWidth([&](auto width, auto over_times) {
      const auto correlate = [&](auto with_silu) {
        causal_conv1d::Correlate<width, over_times, with_silu>(in.data, in.stride, weights.data, weights.stride, biases,
                                                               times, place.channels, out.data, out.stride);
      };
      silu ? correlate(std::true_type{}) : correlate(std::false_type{});
    });
    ForEachBorder(place, is_transposed, time, times, [&](int64_t t, int taps) {
      CorrelateTaps(taps, in.From(t), weights, biases, silu, place.channels, out.From(t).data);
    });
  }

  // Calls body(t, taps) for those of the `times` times from `time` on whose window reaches into another sequence. Bit k
  // of `taps` is set if tap k counts. The window of t has the inputs t - reach() to t; of a transposed correlation, the
  // gradients t to t + reach().
  template <typename Body>
  void ForEachBorder(Place place, bool is_transposed, int64_t time, int64_t times, const Body& body) const {
    const uint8_t* const masks = Masks(place, time);
    if (masks == nullptr) return;
    const int64_t ahead = is_transposed ? reach() : 0, end = std::min(times + ahead, problem_.length - time);
    const auto all_bits = static_cast<uint8_t>((1 << problem_.width) - 1);
    for (int64_t t = 0; t < times;) {
      const int64_t border = t + FirstOther(masks + t, end - t, all_bits);
      if (border == end) return;
      for (t = std::max(t, border - ahead); t <= std::min(border, times - 1); ++t) {
        int taps = 0;
        for (int k = 0; k < problem_.width; ++k) {
          const int64_t i = is_transposed ? t + k : t, bit = is_transposed ? k : reach() - k;
          if (i < end && (masks[i] >> bit & 1) != 0) taps |= 1 << k;
        }
        body(t, taps);
      }
    }
  }

  // Calls body(in_array, in_tile, count) for runs of consecutive elements of part of an array of x's shape, with the
  // offsets of each run.
  template <typename Body>
  void ForEachRun(int64_t times, int64_t channels, const Body& body) const {
    if (over_times_ || channels == problem_.channels) return body(0, 0, times * channels);
    for (int64_t t = 0; t < times; ++t) body(t * problem_.channels, t * channels, channels);
  }

  // LoadColumns, with a constant length if possible.
  template <typename Number>
  static void LoadRows(const Number* rows, int64_t length, int64_t times, int64_t channels, C* to) {
    WithLength(length, [&](auto constant) { LoadColumns(rows, constant, times, channels, to); });
  }

  // `count` numbers per channel as `count` rows; zeros if the operand is absent.
  void LoadParameter(const Parameter& parameter, int64_t batch, int64_t count, C* to) const {
    const int64_t first = parameter.is_shared ? 0 : batch * problem_.channels * count;
    const auto load = [&](const auto* numbers) { LoadRows(numbers + first, count, count, problem_.channels, to); };
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
  const bool transposes_tiles_;  // relative to arrays of x's shape
  const bool over_times_;
  Lines<C> filters_;
  int64_t filter_stride_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// The forward pass. Like the other passes, it returns false if an allocation fails.

template <typename T>
bool Run(ffi::ThreadPool& pool, const ForwardCall& call, const Convolution<T>& convolution) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  if (problem.HasNoElement()) return true;
  const int64_t tile_times = convolution.tile_times(), tile_channels = convolution.TileChannels(/*num_tiles=*/1);
  const int64_t time_tiles = CeilDivide(problem.length, tile_times);
  const int64_t channel_tiles = CeilDivide(problem.channels, tile_channels);
  const int64_t tiles_of_example = time_tiles * channel_tiles;
  const int64_t bytes =
      problem.batch * problem.examples * problem.channels * problem.length * static_cast<int64_t>(sizeof(T));
  AdviseHugePages(call.y, bytes);
  std::atomic<bool> has_memory{true};
  ForEachRange(pool, problem.batch * problem.examples * tiles_of_example, bytes, [&](int64_t begin, int64_t end) {
    const int64_t window = tile_times + convolution.reach();
    Lines<C> memory;
    if (!memory.Allocate((window + tile_times) * tile_channels)) {
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
      T* const y = convolution.At(static_cast<T*>(call.y), /*is_shared=*/false, place, time);
      const View<C> out = convolution.ResultTile(y, place.channels, memory.get() + window * tile_channels);
      convolution.Forward(place, in, problem.silu, time, times, out);
      convolution.Store(out, times, place.channels, y);
    }
  });
  return has_memory;
}

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
    if (!memory_.Allocate((reach + times + reach + times + reach + times + reach) * channels)) return false;
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
      const T* const dy = convolution_.At(call_.dy, place, time + known);
      if (problem_.silu) {
        convolution_.Forward(place, in.From(known), /*silu=*/false, time + known, missing, {next, channels});
        convolution_.SiluGradientOf(dy, missing, channels, dx_, next);
      } else {
        convolution_.Load(dy, missing, channels, next);
      }
      std::fill(dz_ + wanted * channels, dz_ + (times + reach) * channels, C{0});
      convolution_.SumProducts(place, in, dz_, time, times, sums);
      T* const to = convolution_.At(static_cast<T*>(call_.dx), /*is_shared=*/false, place, time);
      const View<C> dx = convolution_.ResultTile(to, channels, dx_);
      convolution_.Transpose(place, dz_, time, times, dx);
      AddFinalState(place, time, times, dx);
      convolution_.Store(dx, times, channels, to);
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
    return static_cast<C>(convolution_.StateAt(call_.d_final_state, place, reach)[c * reach + i]);
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
  Lines<C> memory_;
  C* inputs_ = nullptr;
  C* dz_ = nullptr;
  C* dx_ = nullptr;  // also a buffer for dy
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
bool Run(ffi::ThreadPool& pool, const BackwardCall& call, const Convolution<T>& convolution) {
  const Problem& problem = call.problem;
  if (problem.batch == 0 || problem.channels == 0) return true;
  const int64_t bytes =
      problem.batch * problem.examples * problem.channels * problem.length * static_cast<int64_t>(sizeof(T));
  AdviseHugePages(call.dx, bytes);
  // A chunk is a range of times of an example. Chunks are grouped into parts. Each part has its own sums, and its
  // chunks are added in order. The split of channels among threads does not affect the sums.
  const int64_t chunk_times = kTilesOfChunk * convolution.tile_times();
  const int64_t chunks_of_example = std::max<int64_t>(1, CeilDivide(problem.length, chunk_times));
  const int64_t chunks = problem.examples * chunks_of_example;
  const int64_t units = CeilDivide(problem.channels, convolution.over_times() ? 1 : kMinChannels);
  const int64_t parts = std::clamp<int64_t>(kMaxParts / (problem.batch * units), 1, std::max<int64_t>(1, chunks));
  const int64_t tile_channels =
      convolution.TileChannels(CeilDivide(4 * std::max<int64_t>(1, pool.num_threads()), problem.batch * parts));
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
bool Run(ffi::ThreadPool& pool, const UpdateCall& call, const Convolution<T>& convolution) {
  if (!Run(pool, static_cast<const ForwardCall&>(call), convolution)) return false;
  // The new state is written last, because it may be in the memory of the old state.
  const Problem& problem = call.problem;
  const int64_t length = call.state_length, inputs = std::min(length, problem.length);
  const int64_t rows = problem.batch * problem.examples * problem.channels;
  ForEachRange(pool, rows, rows * length * static_cast<int64_t>(sizeof(T)), [&](int64_t row, int64_t end) {
    while (row < end) {
      const int64_t example = row / problem.channels, channel = row % problem.channels;
      const Place place{example / problem.examples, example % problem.examples, channel,
                        std::min(problem.channels - channel, end - row)};
      const T* const old_states = convolution.StateAt(call.initial_state, place, length);
      const T* const x = convolution.At(call.x, place, problem.length - inputs);
      const auto shift = [&](auto known_length, auto known_inputs, auto channel_stride) {
        ShiftStates(old_states, known_length, x, known_inputs, channel_stride, convolution.time_stride(),
                    place.channels, static_cast<T*>(call.new_state) + row * length);
      };
      if (inputs == 1 && convolution.channel_stride() == 1) {
        constexpr std::integral_constant<int64_t, 1> kOne{};
        WithLength(length, [&](auto known_length) { shift(known_length, kOne, kOne); });
      } else {
        shift(length, inputs, convolution.channel_stride());
      }
      row += place.channels;
    }
  });
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Targets.

template <typename Call>
ffi::Error RunOnCpu(ffi::ThreadPool& pool, const char* op, Call call) {
  call.problem = WithBestLayout(call.problem);
  const Strategy strategy = Choose(call.problem, ElementBytes(call.type));
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    Convolution<typename decltype(tag)::type> convolution(call, strategy);
    has_memory = convolution.Prepare(pool) && Run(pool, call, convolution);
  });
  return MemoryStatus(op, has_memory);
}

ffi::Error RunForward(ffi::ThreadPool pool, const ForwardCall& call) { return RunOnCpu(pool, kForwardName, call); }

ffi::Error RunBackward(ffi::ThreadPool pool, BackwardCall* call, ffi::RemainingRets more_results, size_t num_decoded) {
  if (more_results.size() == num_decoded) return RunOnCpu(pool, kBackwardName, *call);
  return InvalidArgument(kBackwardName, "got " + std::to_string(3 + more_results.size()) + " results, expected " +
                                            std::to_string(3 + num_decoded));
}

ffi::Error RunUpdate(ffi::ThreadPool pool, const UpdateCall& call) { return RunOnCpu(pool, kUpdateName, call); }

template <typename Call>
Plan PlanOf(const PlanParameters& parameters) {
  const Call call = CallOf<Call>(parameters);
  return Plan{NameOf(kStrategyNames, Choose(WithBestLayout(call.problem), ElementBytes(call.type)))};
}

JB_CPU_TARGET(kForwardName, (HandleForward<ffi::ThreadPool, RunForward>), BindForward<ffi::ThreadPool>(),
              PlanOf<ForwardCall>, JB_NAMES(kStrategyNames));
JB_CPU_TARGET(kBackwardName, (HandleBackward<ffi::ThreadPool, RunBackward>), BindBackward<ffi::ThreadPool>(),
              PlanOf<BackwardCall>, JB_NAMES(kStrategyNames));
JB_CPU_TARGET(kUpdateName, (HandleUpdate<ffi::ThreadPool, RunUpdate>), BindUpdate<ffi::ThreadPool>(),
              PlanOf<UpdateCall>, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::causal_conv1d
