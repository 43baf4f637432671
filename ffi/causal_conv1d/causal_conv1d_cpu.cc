// The CPU kernels of causal_conv1d, its gradient and its update.
//
// Work is split into tiles that fit the L1 and L2 caches: many times of one channel or, with channels last, a few times
// of a block of channels. A tile holds numbers of the compute type as [times, channels]. Loops are vectorised over the
// times of a channel (kOverTimes) or over the channels of a time. The convolution and its transpose are the same
// correlation over a window of times.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

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

// Sequences shorter than this are vectorised over channels, and their tiles transposed when they are loaded and stored.
constexpr int64_t kLongTimes = 48;

// Masks are checked in blocks of this many times. A block with all bits set takes the fast path.
constexpr int64_t kBlockTimesOfChannel = 64, kBlockTimes = 1;

// Chunks of the sums over examples and times. They depend only on shapes, so that the results are the same for any
// number of threads.
constexpr int64_t kChunkTimesOfChannel = 8 * kTimesOfChannel;
constexpr int64_t kChunkTimes = 16 * kTimes;
constexpr int64_t kMaxParts = 128;  // limits parts * batch size * channels in units of the smallest tile

enum class Strategy {
  kNothing,         // no inputs: only states and parameter gradients are written
  kRows,            // tiles of one channel
  kTransposedRows,  // tiles of several channels, transposed
  kChannelsLast,    // tiles of several channels
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

template <typename C>
JB_INLINE C Silu(C z) {
  return z / (C{1} + ExpOrZero(-z));
}

// Runs of consecutive elements in memory. In a tile, the runs follow each other without gaps.
struct Runs {
  int64_t count;
  int64_t length;
  int64_t stride;  // from run to run, in memory
};

template <typename T, typename C>
JB_CPU_CLONES void LoadRuns(const T* from, Runs runs, C* to) {
  for (int64_t run = 0; run < runs.count; ++run, from += runs.stride, to += runs.length) {
    if constexpr (kIsWidenedAtOnce<T>) {
      Widen(from, runs.length, to);
    } else {
      JB_VECTORIZE
      for (int64_t i = 0; i < runs.length; ++i) to[i] = static_cast<C>(from[i]);
    }
  }
}

template <typename T, typename C>
JB_CPU_CLONES void StoreRuns(const C* from, Runs runs, T* to) {
  for (int64_t run = 0; run < runs.count; ++run, from += runs.length, to += runs.stride) {
    if constexpr (kIsWidenedAtOnce<T>) {
      Narrow(from, runs.length, to);
    } else {
      JB_VECTORIZE
      for (int64_t i = 0; i < runs.length; ++i) Store(from[i], to + i);
    }
  }
}

// Replaces z by its cotangent.
template <typename T, typename C>
JB_CPU_CLONES void SiluGradient(const T* dy, Runs runs, C* z) {
  for (int64_t run = 0; run < runs.count; ++run, dy += runs.stride, z += runs.length) {
    ForEachPart(dy, runs.length, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
      C* const part = z + begin;
      JB_VECTORIZE
      for (int64_t i = 0; i < count; ++i) {
        const C exponential = ExpOrZero(-part[i]), sigmoid = C{1} / (C{1} + exponential);
        const C of_negative = part[i] < C{0} ? C{1} - sigmoid : exponential * sigmoid;  // sigmoid(-z)
        part[i] = static_cast<C>(numbers[i]) * (sigmoid * (C{1} + part[i] * of_negative));
      }
    });
  }
}

// Transposes numbers [begin, begin + times) of each channel's row to [times, channels]. Rows have kLength numbers, or
// `length` if kLength is 0.
template <int kLength, typename T, typename C>
JB_CPU_CLONES void LoadColumns(const T* rows, int64_t length, int64_t begin, int64_t times, int64_t channels, C* to) {
  const int64_t stride = kLength == 0 ? length : kLength;
  for (int64_t time = 0; time < times; ++time, to += channels) {
    const T* const from = rows + begin + time;
    JB_VECTORIZE
    for (int64_t c = 0; c < channels; ++c) to[c] = static_cast<C>(from[c * stride]);
  }
}

// Transposes a tile to the first `times` numbers of rows of `length` numbers. kLength is 0, or equal to both.
template <int kLength, typename T, typename C>
JB_CPU_CLONES void StoreColumns(const C* from, int64_t length, int64_t times, int64_t channels, T* rows) {
  const int64_t stride = kLength == 0 ? length : kLength, count = kLength == 0 ? times : kLength;
  JB_VECTORIZE
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t time = 0; time < count; ++time) Store(from[time * channels + c], rows + c * stride + time);
  }
}

// Appends one input per channel to states of kLength inputs (`length` if kLength is 0), and drops the oldest.
// `new_states` may alias `old_states`.
template <int kLength, typename T>
JB_CPU_CLONES void ShiftStates(const T* old_states, int64_t length, const T* x, int64_t channels, T* new_states) {
  const int64_t count = kLength == 0 ? length : kLength;
  JB_VECTORIZE
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t i = 1; i < count; ++i) new_states[c * count + i - 1] = old_states[c * count + i];
    new_states[c * count + count - 1] = x[c];
  }
}

// Calls body with the length as a compile-time constant if it is small, otherwise with 0.
template <typename Body>
void WithLength(int64_t length, const Body& body) {
  if (length >= 1 && length <= kMaxConstantWidth) {
    DispatchWidth(static_cast<int>(length), body);
  } else {
    body(std::integral_constant<int, 0>{});
  }
}

// Numbers [times, channels] with `stride` numbers from one time to the next.
template <typename C>
struct View {
  C* data;
  int64_t stride;

  View From(int64_t time) const { return {data + time * stride, stride}; }
};

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
  constexpr int kMaxRows = kOverTimes ? 1 : 4;  // several times together reuse loaded inputs and weights
  if constexpr (kOverTimes) return run(std::integral_constant<int, 1>{}, 0);
  int64_t t = 0;
  for (; t + kMaxRows <= times; t += kMaxRows) run(std::integral_constant<int, kMaxRows>{}, t);
  for (; t < times; ++t) run(std::integral_constant<int, 1>{}, t);
}

// The masks of `count` times, from the first one of a correlation on. Without data, all bits are set. Tap k counts if
// bit width - 1 - k of the time's mask is set; if transposed, bit k of the mask k times later.
struct Masks {
  const uint8_t* data;
  int64_t count;
  bool is_transposed;

  Masks From(int64_t time) const { return {data + time, count - time, is_transposed}; }
};

// Adds one tap, for the times whose mask has the bit set. Times after the last mask get nothing.
template <bool kOverTimes, typename C>
JB_CPU_CLONES void AddTap(const C* __restrict in, int64_t in_stride, const C* __restrict weights, const uint8_t* masks,
                          int64_t num_masks, int bit, int64_t times, int64_t channels, C* __restrict out,
                          int64_t out_stride) {
  if constexpr (kOverTimes) {
    const C weight = *weights;
    if (masks == nullptr) {
      JB_VECTORIZE
      for (int64_t t = 0; t < times; ++t) out[t] += weight * in[t];
    } else {
      const int64_t count = std::min(times, num_masks);
      JB_VECTORIZE
      for (int64_t t = 0; t < count; ++t) out[t] += (masks[t] >> bit & 1) != 0 ? weight * in[t] : C{0};
    }
  } else {
    for (int64_t t = 0; t < times; ++t, in += in_stride, out += out_stride) {
      if (masks != nullptr && (t >= num_masks || (masks[t] >> bit & 1) == 0)) continue;
      JB_VECTORIZE
      for (int64_t c = 0; c < channels; ++c) out[c] += weights[c] * in[c];
    }
  }
}

template <typename C>
JB_CPU_CLONES void ApplySilu(C* z, int64_t count) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) z[i] = Silu(z[i]);
}

// The numbers of one 64-byte vector register, or of several shorter ones.
template <typename C>
struct Lanes {
  static constexpr int64_t kCount = kLineBytes / sizeof(C);
  typedef C Type __attribute__((vector_size(kLineBytes)));
};

// Adds the sum over t of dz[t, c] * in[t + k, c] to sums[k, c], and the sum of dz to sums_of_dz[c] unless that is
// nullptr. dz has no gaps. The order of the sums is fixed.
template <int kWidth, bool kOverTimes, typename C>
JB_CPU_CLONES void SumProducts(View<const C> in, const C* dz, int64_t times, int64_t channels, View<double> sums,
                               double* sums_of_dz) {
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
      if (k == kWidth && sums_of_dz == nullptr) return;
      double* const to = k < kWidth ? sums.data + k * sums.stride : sums_of_dz;
      if constexpr (kOverTimes) {
        double total = 0;
        if constexpr (kLanes == 1) {
          total = static_cast<double>(products[k]);
        } else {
          for (int64_t lane = 0; lane < kLanes; ++lane) total += static_cast<double>(products[k][lane]);
        }
        *to += total;
      } else {
        C numbers[kLanes];
        std::memcpy(numbers, &products[k], sizeof(Vector));
        for (int64_t lane = 0; lane < kLanes; ++lane) to[first + lane] += static_cast<double>(numbers[lane]);
      }
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

// Adds the sums of products of one tap, for the times whose mask has the bit set; if !kOfTap, the sums of dz.
template <bool kOverTimes, bool kOfTap, typename C>
JB_CPU_CLONES void SumTap(const C* in, int64_t in_stride, const C* dz, const uint8_t* masks, int bit, int64_t times,
                          int64_t channels, double* sums) {
  if constexpr (kOverTimes) {
    constexpr int64_t kLanes = Lanes<C>::kCount;
    C lanes[kLanes] = {};
    const auto add = [&](int64_t begin, auto count) __attribute__((always_inline)) {
      const int64_t size = count;
      JB_VECTORIZE
      for (int64_t i = 0; i < size; ++i) {
        const int64_t t = begin + i;
        lanes[i] += !kOfTap ? dz[t] : (masks[t] >> bit & 1) != 0 ? dz[t] * in[t] : C{0};
      }
    };
    int64_t begin = 0;
    for (; begin + kLanes <= times; begin += kLanes) add(begin, std::integral_constant<int64_t, kLanes>{});
    add(begin, times - begin);
    double total = 0;
    for (const C lane : lanes) total += static_cast<double>(lane);
    *sums += total;
  } else {
    for (int64_t t = 0; t < times; ++t, in += in_stride, dz += channels) {
      if (kOfTap && (masks[t] >> bit & 1) == 0) continue;
      JB_VECTORIZE
      for (int64_t c = 0; c < channels; ++c) sums[c] += static_cast<double>(kOfTap ? dz[c] * in[c] : dz[c]);
    }
  }
}

JB_CPU_CLONES bool AllEqual(const uint8_t* bytes, int64_t count, int value) {
  int differences = 0;
  for (int64_t i = 0; i < count; ++i) differences |= bytes[i] ^ value;
  return differences == 0;
}

// Uninitialised memory, aligned to a cache line.
template <typename C>
class Lines {
 public:
  // Returns false if the allocation fails.
  bool Allocate(int64_t count) {
    memory_ = jax_baracuda::Allocate<C>(count + Lanes<C>::kCount);
    begin_ = AlignUp(memory_.get(), kLineBytes);
    return memory_ != nullptr;
  }

  C* get() const { return begin_; }

 private:
  std::unique_ptr<C[]> memory_;
  C* begin_ = nullptr;
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
        is_transposed_(strategy == Strategy::kTransposedRows),
        over_times_(!problem_.channels_last && !is_transposed_) {}

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
  int64_t time_stride() const { return problem_.channels_last ? problem_.channels : 1; }  // in arrays of x's shape

  // The address of the place's first channel at a time, in an array of x's shape.
  template <typename Number>
  Number* At(Number* array, bool is_shared, Place place, int64_t time) const {
    const int64_t example = Example(is_shared, place);
    return array + (problem_.channels_last ? (example * problem_.length + time) * problem_.channels + place.channel
                                           : (example * problem_.channels + place.channel) * problem_.length + time);
  }
  const T* At(const Operand& operand, Place place, int64_t time) const {
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
    LoadRuns(from, RunsOf(times, channels), tile);
  }

  void Store(const C* tile, int64_t times, int64_t channels, T* to) const {
    if (!is_transposed_) return StoreRuns(tile, RunsOf(times, channels), to);
    WithLength(times == problem_.length ? times : 0,
               [&](auto length) { StoreColumns<length>(tile, problem_.length, times, channels, to); });
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
    Correlate(in, filter, filter.From(problem_.width).data, {SameSequence(place, time), times, false}, silu, times,
              place.channels, z);
  }

  // Replaces z of a tile by its cotangent. The buffer has the size of the tile.
  void SiluGradientOf(const T* dy, int64_t times, int64_t channels, C* buffer, C* z) const {
    if (!is_transposed_) return SiluGradient(dy, RunsOf(times, channels), z);
    Copy(dy, times, channels, buffer);
    SiluGradient(buffer, Runs{1, times * channels, 0}, z);
  }

  // dx of `times` times from `time` on, without the contribution of the final state. `dz` begins at `time` too: it has
  // `gradients` times, then zeros up to the end of the last window.
  void Transpose(Place place, const C* dz, int64_t time, int64_t gradients, int64_t times, View<C> dx) const {
    static constexpr C kZeros[kMaxChannels] = {};
    const View<const C> reversed{Filter(place).From(reach()).data, -problem_.channels};
    Correlate({dz, place.channels}, reversed, kZeros, {SameSequence(place, time), gradients, true}, /*silu=*/false,
              times, place.channels, dx);
  }

  // Adds to the sums for the weights and the bias: one row of all channels per tap, then one for the bias.
  void SumProducts(Place place, View<const C> in, const C* dz, int64_t time, int64_t times, double* sums) const {
    const uint8_t* const masks = SameSequence(place, time);
    const View<double> rows{sums + place.channel, problem_.channels};
    ForEachRun({masks, times, false}, times, [&](int64_t begin, int64_t end, bool has_masks) {
      const View<const C> first = in.From(begin);
      const C* const first_dz = dz + begin * place.channels;
      double* const sums_of_dz = rows.From(problem_.width).data;
      OverTimes([&](auto over_times) {
        if (has_masks) {
          const auto sum = [&](auto of_tap, int k, double* to) {
            SumTap<over_times, of_tap>(first.From(k).data, first.stride, first_dz, masks + begin, reach() - k,
                                       end - begin, place.channels, to);
          };
          for (int k = 0; k < problem_.width; ++k) sum(std::true_type{}, k, rows.From(k).data);
          return sum(std::false_type{}, 0, sums_of_dz);
        }
        for (int tap = 0; tap < problem_.width; tap += kMaxConstantWidth) {
          DispatchWidth(std::min(problem_.width - tap, kMaxConstantWidth), [&](auto width) {
            causal_conv1d::SumProducts<width, over_times>(first.From(tap), first_dz, end - begin, place.channels,
                                                          rows.From(tap), tap == 0 ? sums_of_dz : nullptr);
          });
        }
      });
    });
  }

 private:
  int64_t Example(bool is_shared, Place place) const {
    return (is_shared ? 0 : place.batch) * problem_.examples + place.example;
  }

  // Calls body(std::bool_constant<kOverTimes>{}).
  template <typename Body>
  void OverTimes(const Body& body) const {
    over_times_ ? body(std::true_type{}) : body(std::false_type{});
  }

  void Correlate(View<const C> in, View<const C> weights, const C* biases, const Masks& masks, bool silu, int64_t times,
                 int64_t channels, View<C> out) const {
    ForEachRun(masks, times, [&](int64_t begin, int64_t end, bool has_masks) {
      OverTimes([&](auto over_times) {
        const auto add_taps = [&](int first_tap, const Masks& of_run) {
          for (int k = first_tap; k < problem_.width; ++k) {
            const int later = of_run.is_transposed ? k : 0, bit = of_run.is_transposed ? k : problem_.width - 1 - k;
            const uint8_t* const of_tap = of_run.data == nullptr ? nullptr : of_run.data + later;
            AddTap<over_times>(in.From(begin + k).data, in.stride, weights.From(k).data, of_tap, of_run.count - later,
                               bit, end - begin, channels, out.From(begin).data, out.stride);
          }
          if (!silu) return;
          const int64_t rows = over_times ? 1 : end - begin, columns = over_times ? end - begin : channels;
          for (int64_t row = 0; row < rows; ++row) ApplySilu(out.From(begin + row).data, columns);
        };
        if (has_masks) {
          if (over_times) {
            std::fill(out.From(begin).data, out.From(end).data, *biases);
          } else {
            for (int64_t t = begin; t < end; ++t) std::copy_n(biases, channels, out.From(t).data);
          }
          return add_taps(0, masks.From(begin));
        }
        const bool is_wide = problem_.width > kMaxConstantWidth;
        DispatchWidth(std::min(problem_.width, kMaxConstantWidth), [&](auto width) {
          const auto run = [&](auto with_silu) {
            causal_conv1d::Correlate<width, over_times, with_silu>(in.From(begin).data, in.stride, weights.data,
                                                                   weights.stride, biases, end - begin, channels,
                                                                   out.From(begin).data, out.stride);
          };
          silu && !is_wide ? run(std::true_type{}) : run(std::false_type{});
        });
        if (is_wide) add_taps(kMaxConstantWidth, {nullptr, 0, false});
      });
    });
  }

  // Calls body(begin, end, has_masks) for runs of times. Runs without masks have all taps in one sequence.
  template <typename Body>
  void ForEachRun(const Masks& masks, int64_t times, const Body& body) const {
    const auto is_whole = [&](int64_t begin, int64_t end) {
      const int64_t end_mask = masks.is_transposed ? std::min(end + reach(), masks.count) : end;
      return AllEqual(masks.data + begin, end_mask - begin, (1 << problem_.width) - 1);
    };
    if (masks.data == nullptr || is_whole(0, times)) return body(int64_t{0}, times, false);
    const int64_t step = over_times_ ? kBlockTimesOfChannel : kBlockTimes;
    bool next_has_masks = !is_whole(0, std::min(step, times));
    for (int64_t begin = 0, end = 0; begin < times; begin = end) {
      const bool has_masks = next_has_masks;
      do {
        end = std::min(end + step, times);
        if (end < times) next_has_masks = !is_whole(end, std::min(end + step, times));
      } while (end < times && next_has_masks == has_masks);
      body(begin, end, has_masks);
    }
  }

  Runs RunsOf(int64_t times, int64_t channels) const {
    if (channels == problem_.channels || over_times_) return {1, times * channels, 0};
    return {times, channels, problem_.channels};
  }

  // Transposes numbers [begin, begin + times) of each channel's row of `length` numbers to [times, channels].
  template <typename Number>
  static void LoadRows(const Number* rows, int64_t length, int64_t begin, int64_t times, int64_t channels, C* to) {
    WithLength(length,
               [&](auto constant_length) { LoadColumns<constant_length>(rows, length, begin, times, channels, to); });
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
  Lines<C> filters_;
  int64_t filter_stride_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// The forward pass. Like the other passes, it returns false if an allocation fails.

// Computes y of `times` times from `time` on. `in` begins at the first input of the first window. The buffer has room for
// a tile.
template <typename T, typename C = ComputeType<T>>
void WriteTile(const ForwardCall& call, const Convolution<T>& convolution, Place place, View<const C> in, int64_t time,
               int64_t times, C* buffer) {
  T* const y = convolution.At(static_cast<T*>(call.y), /*is_shared=*/false, place, time);
  View<C> out = convolution.InPlace(y);
  const bool is_in_place = out.data != nullptr;
  if (!is_in_place) out = {buffer, place.channels};
  convolution.Forward(place, in, call.problem.silu, time, times, out);
  if (!is_in_place) convolution.Store(out.data, times, place.channels, y);
}

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
      WriteTile(call, convolution, place, in, time, times, memory.get() + window * tile_channels);
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
        convolution_.Copy(dy, missing, channels, next);
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
  const int64_t chunk_times = convolution.over_times() ? kChunkTimesOfChannel : kChunkTimes;
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
        WithLength(length, [&](auto count) { ShiftStates<count>(old, length, x, channels, to); });
      } else {
        std::memmove(static_cast<void*>(to), old + (length - kept), static_cast<size_t>(kept) * sizeof(T));
        for (int64_t i = kept; i < length; ++i) to[i] = x[(i - kept) * convolution.time_stride()];
      }
      row += channels;
    }
  });
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sequences whose states are in a pool.

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
    const auto* const slots = static_cast<const int32_t*>(pool.slots_of_sequences.data);
    const int64_t slot = slots[(pool.slots_of_sequences.is_shared ? 0 : batch * pool.sequences) + index];
    return slot >= 0 && slot < pool.slots ? slot : -1;
  }

  const T* get() const { return states_.get(); }
  const T* At(int64_t batch, int64_t index, int64_t channel) const {
    return states_.get() + ((batch * sequences_ + index) * channels_ + channel) * length_;
  }

 private:
  int64_t sequences_ = 0, channels_ = 0, length_ = 0;
  std::unique_ptr<T[]> states_;
};

void CopyPool(ffi::ThreadPool& threads, const StatePool& pool) {
  if (pool.data == pool.old_data) return;
  ForEachRange(threads, pool.bytes, 2 * pool.bytes, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(pool.data) + begin, static_cast<const char*>(pool.old_data) + begin,
                static_cast<size_t>(end - begin));
  });
}

// Writes the states after the sequences: the last `num_written` of the old and new inputs of each, from the first entry
// of a row on. Of the sequences of a slot, only the last one writes. They are in order.
template <typename T>
bool WriteStates(ffi::ThreadPool& threads, const ForwardCall& call, const StatePool& pool,
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
bool Run(ffi::ThreadPool& threads, const RaggedCall& call, const Convolution<T>& convolution) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  if (problem.HasNoElement()) return true;
  const StatePool& pool = call.pool;
  OldStates<T> old_states;
  const auto* const has_state = static_cast<const bool*>(call.has_state.data);
  const bool has_memory = old_states.Load(threads, problem, pool, [&](int64_t batch, int64_t index) {
    return has_state[(call.has_state.is_shared ? 0 : batch * pool.sequences) + index] ? 0 : -1;
  });
  if (!has_memory) return false;

  // Sequences follow each other. Times that no sequence has are padding, which is a sequence without a number.
  constexpr int64_t kPadding = -1;
  std::vector<Sequence> sequences, all;
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    const auto* const starts =
        static_cast<const int32_t*>(call.starts.data) + (call.starts.is_shared ? 0 : batch * (pool.sequences + 1));
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
  AdviseHugePages(call.y, bytes);
  std::atomic<bool> tiles_have_memory{true};
  ForEachRange(threads, first_tiles.back(), bytes, [&](int64_t begin, int64_t end) {
    const int64_t window = tile_times + convolution.reach();
    Lines<C> memory;
    if (!memory.Allocate((window + tile_times) * tile_channels)) {
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
bool Run(ffi::ThreadPool& threads, const PoolUpdateCall& call, const OldStates<T>& old_states,
         const Convolution<T>& convolution) {
  if (!Run(threads, static_cast<const ForwardCall&>(call), convolution)) return false;
  const Problem& problem = call.problem;
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < problem.batch * problem.examples; ++i) {
    const int64_t example = i % problem.examples;
    sequences.push_back({i / problem.examples, example, example, 0, problem.length});
  }
  return WriteStates(threads, call, call.pool, sequences, old_states, call.num_written(), convolution);
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

ffi::Error RunRagged(ffi::ThreadPool threads, const RaggedCall& given) {
  CopyPool(threads, given.pool);
  RaggedCall call = given;
  call.state_length = call.problem.width - 1;
  return RunOnCpu(threads, kRaggedName, call);
}

ffi::Error RunPoolUpdate(ffi::ThreadPool threads, const PoolUpdateCall& given) {
  CopyPool(threads, given.pool);
  PoolUpdateCall call = given;
  call.problem = WithBestLayout(call.problem);
  const Problem& problem = call.problem;
  if (problem.HasNoElement()) return ffi::Error::Success();
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* const num_accepted = static_cast<const int32_t*>(call.num_accepted.data);
    const int64_t latest = call.pool.length - (problem.width - 1);
    OldStates<T> old_states;
    has_memory = old_states.Load(threads, problem, call.pool, [&](int64_t batch, int64_t index) {
      if (num_accepted == nullptr) return int64_t{0};
      const int64_t count = num_accepted[(call.num_accepted.is_shared ? 0 : batch * problem.examples) + index];
      return std::clamp<int64_t>(count - 1, 0, latest);
    });
    call.initial_state = Operand{old_states.get(), /*is_shared=*/false};
    call.state_length = problem.width - 1;
    Convolution<T> convolution(call, Choose(problem, ElementBytes(call.type)));
    has_memory = has_memory && convolution.Prepare(threads) && Run(threads, call, old_states, convolution);
  });
  return MemoryStatus(kPoolUpdateName, has_memory);
}

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
JB_CPU_TARGET(kRaggedName, (HandleRagged<ffi::ThreadPool, RunRagged>), BindRagged<ffi::ThreadPool>(),
              PlanOf<ForwardCall>, "nothing", "rows", "channels_last");
JB_CPU_TARGET(kPoolUpdateName, (HandlePoolUpdate<ffi::ThreadPool, RunPoolUpdate>), BindPoolUpdate<ffi::ThreadPool>(),
              PlanOf<PoolUpdateCall>, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::causal_conv1d
