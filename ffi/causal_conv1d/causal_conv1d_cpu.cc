// The CPU kernels of causal_conv1d, its gradient and its update.
//
// Work is split into tiles that fit the L1 and L2 caches: many times of one channel or, with channels last, a few times
// of a block of channels. A tile holds numbers of the compute type as [times, channels] in both layouts. The
// convolution and its transpose are the same correlation over a window of times. The layouts differ in whether the
// weights vary within a vector.

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

constexpr size_t kLineBytes = 64;  // a cache line, and the longest vector register

// Tile sizes. With channels last, a tile has whole rows if possible: long contiguous reads are fastest.
constexpr int64_t kTimesOfChannel = 1024;  // tiles of one channel
constexpr int64_t kTimes = 16;             // tiles of several channels
constexpr int64_t kMaxChannels = 2048;
constexpr int64_t kMinChannels = 128;  // if there are more threads than tiles

// Sequences shorter than this are vectorised over channels, and their tiles transposed when they are loaded and stored.
constexpr int64_t kLongTimes = 48;

// Masks of one channel are checked in blocks of this many times. A block with all bits set takes the fast path.
constexpr int64_t kBlockTimes = 64;

// Chunks of the sums over examples and times. They depend only on shapes, so that the results are the same for any
// number of threads.
constexpr int64_t kChunkTimesOfChannel = 8 * kTimesOfChannel;
constexpr int64_t kChunkTimes = 16 * kTimes;
constexpr int64_t kMaxParts = 128;  // limits parts * batch size * channels in units of the smallest tile

// ---------------------------------------------------------------------------------------------------------------------
// Strategies.

enum class Strategy {
  kNothing,
  kRows,                // tiles of one channel
  kRowsWithSegmentIds,  // the same, with same_sequence
  kTransposedRows,      // tiles of several channels, transposed
  kTransposedRowsWithSegmentIds,
  kChannelsLast,  // tiles of several channels
  kChannelsLastWithSegmentIds,
  kNoInputs,  // no inputs: only states and parameter gradients are written
  kOneInput,  // an update that shifts the states by one
};

constexpr const char* kStrategyNames[] = {"nothing",
                                          "rows",
                                          "rows_with_segment_ids",
                                          "transposed_rows",
                                          "transposed_rows_with_segment_ids",
                                          "channels_last",
                                          "channels_last_with_segment_ids",
                                          "no_inputs",
                                          "one_input"};
constexpr int kForwardStrategies = 7, kBackwardStrategies = 8;  // the number of names above that each op uses

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
Strategy ChooseForward(const Problem& problem, int64_t element_bytes) {
  if (problem.HasNoElement()) return Strategy::kNothing;
  const int64_t numbers_of_line = kLineBytes / std::max<int64_t>(sizeof(float), element_bytes);
  if (problem.channels_last) {
    return problem.has_same_sequence ? Strategy::kChannelsLastWithSegmentIds : Strategy::kChannelsLast;
  }
  if (problem.length < kLongTimes && problem.channels >= numbers_of_line) {
    return problem.has_same_sequence ? Strategy::kTransposedRowsWithSegmentIds : Strategy::kTransposedRows;
  }
  return problem.has_same_sequence ? Strategy::kRowsWithSegmentIds : Strategy::kRows;
}

Strategy ChooseBackward(const Problem& problem, int64_t element_bytes) {
  if (problem.batch == 0 || problem.channels == 0) return Strategy::kNothing;
  const Strategy strategy = ChooseForward(problem, element_bytes);
  return strategy == Strategy::kNothing ? Strategy::kNoInputs : strategy;
}

Strategy ChooseUpdate(const Problem& problem, int64_t element_bytes, int64_t state_length) {
  if (problem.batch == 0 || problem.examples == 0 || problem.channels == 0) return Strategy::kNothing;
  if (problem.length == 0) return Strategy::kNoInputs;
  const bool shifts = problem.length == 1 && problem.channels_last && state_length >= 1 && state_length <= kMaxWidth;
  return shifts ? Strategy::kOneInput : ChooseForward(problem, element_bytes);
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
JB_CPU_CLONES void Load(const T* from, Runs runs, C* to) {
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

template <typename C>
JB_CPU_CLONES void ApplySilu(int64_t count, C* z) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) z[i] = Silu(z[i]);
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

// The numbers of one 64-byte vector register, or of several shorter ones.
template <typename C>
struct Lanes {
  static constexpr int64_t kCount = kLineBytes / sizeof(C);
  typedef C Type __attribute__((vector_size(kLineBytes)));
};

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

// Calls body with the length as a compile-time constant if it is small, otherwise with 0.
template <typename Body>
void WithLength(int64_t length, const Body& body) {
  if (length >= 1 && length <= kMaxConstantWidth) {
    DispatchWidth(static_cast<int>(length), body);
  } else {
    body(std::integral_constant<int, 0>{});
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

template <int kWidth, bool kSilu, typename C>
JB_CPU_CLONES void CorrelateTimes(const C* __restrict in, const C* weights, int64_t weight_stride, C bias,
                                  int64_t times, C* __restrict out) {
  C weight[kWidth];
  for (int k = 0; k < kWidth; ++k) weight[k] = weights[k * weight_stride];
  JB_VECTORIZE
  for (int64_t t = 0; t < times; ++t) {
    C sum = bias;
    for (int k = 0; k < kWidth; ++k) sum += weight[k] * in[t + k];
    out[t] = kSilu ? Silu(sum) : sum;
  }
}

template <int kWidth, bool kSilu, typename C>
JB_CPU_CLONES void CorrelateChannels(const C* __restrict in, int64_t in_stride, const C* __restrict weights,
                                     int64_t weight_stride, const C* __restrict bias, int64_t times, int64_t channels,
                                     C* __restrict out, int64_t out_stride) {
  // Several times together reuse loaded inputs and weights.
  constexpr int kMaxAtOnce = 4;
  const auto run = [&](auto count, int64_t t) __attribute__((always_inline)) {
    constexpr int kTimesAtOnce = count;
    const C* const from = in + t * in_stride;
    C* const to = out + t * out_stride;
    JB_VECTORIZE
    for (int64_t c = 0; c < channels; ++c) {
      C window[kTimesAtOnce + kWidth - 1];
      for (int i = 0; i < kTimesAtOnce + kWidth - 1; ++i) window[i] = from[i * in_stride + c];
      for (int i = 0; i < kTimesAtOnce; ++i) {
        C sum = bias[c];
        for (int k = 0; k < kWidth; ++k) sum += weights[k * weight_stride + c] * window[i + k];
        to[i * out_stride + c] = kSilu ? Silu(sum) : sum;
      }
    }
  };
  int64_t t = 0;
  for (; t + kMaxAtOnce <= times; t += kMaxAtOnce) run(std::integral_constant<int, kMaxAtOnce>{}, t);
  for (; t < times; ++t) run(std::integral_constant<int, 1>{}, t);
}

template <typename C>
JB_CPU_CLONES void AddTimes(const C* __restrict in, C weight, int64_t times, C* __restrict out) {
  JB_VECTORIZE
  for (int64_t t = 0; t < times; ++t) out[t] += weight * in[t];
}

template <typename C>
JB_CPU_CLONES void AddMaskedTimes(const C* __restrict in, C weight, const uint8_t* masks, int bit, int64_t times,
                                  C* __restrict out) {
  JB_VECTORIZE
  for (int64_t t = 0; t < times; ++t) out[t] += (masks[t] >> bit & 1) != 0 ? weight * in[t] : C{0};
}

template <typename C>
JB_CPU_CLONES void AddChannels(const C* __restrict in, const C* __restrict weights, int64_t channels,
                               C* __restrict out) {
  JB_VECTORIZE
  for (int64_t c = 0; c < channels; ++c) out[c] += weights[c] * in[c];
}

template <typename Vector, typename C>
JB_INLINE void LoadVector(const C* from, Vector* vector) {
  std::memcpy(vector, from, sizeof(Vector));
}

// Adds the lanes of a vector to `sum`, in a fixed order.
template <typename C>
JB_INLINE void AddLanes(const typename Lanes<C>::Type& lanes, double* sum) {
  double total = 0;
  for (int64_t lane = 0; lane < Lanes<C>::kCount; ++lane) total += static_cast<double>(lanes[lane]);
  *sum += total;
}

// Adds the sum over t of dz[t] * in[t + k] to sums[k * stride], and the sum of dz to *sum_of_dz unless that is nullptr.
template <int kWidth, typename C>
JB_CPU_CLONES void SumProductsTimes(const C* in, const C* dz, int64_t times, double* sums, int64_t stride,
                                    double* sum_of_dz) {
  using Vector = typename Lanes<C>::Type;
  constexpr int64_t kLanes = Lanes<C>::kCount;
  Vector products[kWidth + 1] = {};  // the last one is the sum of dz
  const auto add = [&](const C* d, const C* x) __attribute__((always_inline)) {
    Vector gradient, input;
    LoadVector(d, &gradient);
    products[kWidth] += gradient;
    for (int k = 0; k < kWidth; ++k) {
      LoadVector(x + k, &input);
      products[k] += gradient * input;
    }
  };
  int64_t t = 0;
  for (; t + kLanes <= times; t += kLanes) add(dz + t, in + t);
  for (int64_t lane = 0; t < times; ++t, ++lane) {
    products[kWidth][lane] += dz[t];
    for (int k = 0; k < kWidth; ++k) products[k][lane] += dz[t] * in[t + k];
  }
  for (int k = 0; k < kWidth; ++k) AddLanes<C>(products[k], sums + k * stride);
  if (sum_of_dz != nullptr) AddLanes<C>(products[kWidth], sum_of_dz);
}

// The same per channel, with sums[k * stride + channel] and sums_of_dz[channel].
template <int kWidth, typename C>
JB_CPU_CLONES void SumProductsChannels(const C* in, int64_t in_stride, const C* dz, int64_t times, int64_t channels,
                                       double* sums, int64_t stride, double* sums_of_dz) {
  const auto add = [&](auto tag, int64_t c) __attribute__((always_inline)) {
    using Vector = typename decltype(tag)::type;
    Vector products[kWidth + 1] = {};
    for (int64_t t = 0; t < times; ++t) {
      Vector gradient, input;
      LoadVector(dz + t * channels + c, &gradient);
      products[kWidth] += gradient;
      for (int k = 0; k < kWidth; ++k) {
        LoadVector(in + (t + k) * in_stride + c, &input);
        products[k] += gradient * input;
      }
    }
    for (int k = 0; k < (sums_of_dz == nullptr ? kWidth : kWidth + 1); ++k) {
      C numbers[sizeof(Vector) / sizeof(C)];
      std::memcpy(numbers, &products[k], sizeof(Vector));
      double* const to = (k < kWidth ? sums + k * stride : sums_of_dz) + c;
      for (size_t lane = 0; lane < sizeof(Vector) / sizeof(C); ++lane) to[lane] += static_cast<double>(numbers[lane]);
    }
  };
  int64_t c = 0;
  for (; c + Lanes<C>::kCount <= channels; c += Lanes<C>::kCount) add(TypeTag<typename Lanes<C>::Type>{}, c);
  for (; c < channels; ++c) add(TypeTag<C>{}, c);
}

// Adds dz[t] * in[t] over the times whose mask has the bit set.
template <typename C>
JB_CPU_CLONES void SumMaskedTimes(const C* in, const C* dz, const uint8_t* masks, int bit, int64_t times, double* sum) {
  C lanes[Lanes<C>::kCount] = {};
  for (int64_t begin = 0; begin < times; begin += Lanes<C>::kCount) {
    const int64_t count = std::min(Lanes<C>::kCount, times - begin);
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      lanes[i] += (masks[begin + i] >> bit & 1) != 0 ? dz[begin + i] * in[begin + i] : C{0};
    }
  }
  double total = 0;
  for (const C lane : lanes) total += static_cast<double>(lane);
  *sum += total;
}

template <typename C>
JB_CPU_CLONES void SumProductsOfTime(const C* in, const C* dz, int64_t channels, double* sums) {
  JB_VECTORIZE
  for (int64_t c = 0; c < channels; ++c) sums[c] += static_cast<double>(dz[c] * in[c]);
}

template <typename C>
JB_CPU_CLONES void SumChannels(const C* dz, int64_t channels, double* sums) {
  JB_VECTORIZE
  for (int64_t c = 0; c < channels; ++c) sums[c] += static_cast<double>(dz[c]);
}

JB_CPU_CLONES bool AllEqual(const uint8_t* bytes, int64_t count, int value) {
  int differences = 0;
  for (int64_t i = 0; i < count; ++i) differences |= bytes[i] ^ value;
  return differences == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Operands.

// The parameters in the compute type: `width` rows of weights, then a row of biases. Each row has all channels.
template <typename C>
class Parameters {
 public:
  // Returns false if the allocation fails.
  bool Prepare(ffi::ThreadPool& pool, const Problem& problem, const Parameter& weight, const Parameter& bias) {
    const bool are_shared = weight.is_shared && (bias.data == nullptr || bias.is_shared);
    const int64_t batch = are_shared ? std::min<int64_t>(1, problem.batch) : problem.batch;
    const int64_t channels = problem.channels, width = problem.width, rows = batch * channels;
    batch_stride_ = are_shared ? 0 : (width + 1) * channels;
    if (!values_.Allocate(rows * (width + 1))) return false;
    const int64_t chunks = std::min(ChunksFor(pool, rows * (width + 1) * static_cast<int64_t>(sizeof(C))), rows);
    ParallelFor(pool, chunks, [&](int64_t chunk) {
      const int64_t begin = ChunkBegin(rows, chunks, chunk), end = ChunkBegin(rows, chunks, chunk + 1);
      Copy(weight, width, channels, begin, end, values_.get());
      if (bias.data != nullptr) return Copy(bias, 1, channels, begin, end, values_.get() + width * channels);
      for (int64_t row = begin; row < end; ++row) {
        values_.get()[row / channels * batch_stride_ + width * channels + row % channels] = C{0};
      }
    });
    return true;
  }

  const C* Of(int64_t batch) const { return values_.get() + batch * batch_stride_; }

 private:
  // Copies `count` numbers per channel to `count` rows, for channels [begin, end) numbered through the whole batch.
  void Copy(const Parameter& parameter, int64_t count, int64_t channels, int64_t begin, int64_t end, C* to) const {
    DispatchFloating(parameter.type, [&](auto tag) {
      const auto* const from = static_cast<const typename decltype(tag)::type*>(parameter.data);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t g = row / channels, c = row % channels;
        const auto* const numbers = from + (parameter.is_shared ? c : row) * count;
        C* const first = to + g * batch_stride_ + c;
        for (int64_t k = 0; k < count; ++k) first[k * channels] = static_cast<C>(numbers[k]);
      }
    });
  }

  Lines<C> values_;
  int64_t batch_stride_ = 0;
};

// The inputs before time 0: the newest `width - 1` of `length` inputs per channel. Zeros if data is nullptr.
template <typename T>
struct InitialState {
  const T* data;
  bool is_shared;
  int64_t length;
};

// An example of a batch element.
struct Place {
  int64_t batch, example;
};

// Shared by the forward and the backward pass.
template <typename T>
class Convolution {
 public:
  using C = ComputeType<T>;

  // The channels of a tile.
  struct Channels {
    int64_t begin, count;
  };

  Convolution(const ConvolutionCall& call, Strategy strategy, const Parameters<C>& parameters)
      : problem_(call.problem),
        x_(static_cast<const T*>(call.x.data)),
        x_is_shared_(call.x.is_shared),
        initial_state_{static_cast<const T*>(call.initial_state.data), call.initial_state.is_shared, call.state_length},
        same_sequence_(static_cast<const uint8_t*>(call.same_sequence.data)),
        same_sequence_is_shared_(call.same_sequence.is_shared),
        parameters_(parameters),
        is_transposed_(strategy == Strategy::kTransposedRows || strategy == Strategy::kTransposedRowsWithSegmentIds),
        has_channels_(problem_.channels_last || is_transposed_) {}

  // Whether tiles have several channels.
  bool has_channels() const { return has_channels_; }

  int64_t tile_times() const { return has_channels_ ? kTimes : kTimesOfChannel; }

  // The channels per tile, if about `num_tiles` tiles along the channels keep all threads busy.
  int64_t TileChannels(int64_t num_tiles) const {
    if (!has_channels_) return 1;
    const int64_t lines = CeilDivide(problem_.channels, num_tiles * Lanes<C>::kCount);
    return std::clamp(lines * Lanes<C>::kCount, kMinChannels, kMaxChannels);
  }

  int64_t reach() const { return problem_.width - 1; }
  int64_t time_stride() const { return problem_.channels_last ? problem_.channels : 1; }  // in arrays of x's shape

  // The index of an element in an array of x's shape.
  int64_t Index(bool is_shared, Place place, int64_t time, int64_t channel) const {
    const int64_t place_index = (is_shared ? 0 : place.batch) * problem_.examples + place.example;
    return problem_.channels_last ? (place_index * problem_.length + time) * problem_.channels + channel
                                  : (place_index * problem_.channels + channel) * problem_.length + time;
  }

  // The index of a channel's state in an array of states of `length` inputs.
  int64_t StateIndex(bool is_shared, Place place, int64_t channel, int64_t length) const {
    return (((is_shared ? 0 : place.batch) * problem_.examples + place.example) * problem_.channels + channel) * length;
  }

  // LoadTile and StoreTile copy between a tile and an array of x's shape, starting at the tile's first element.
  void LoadTile(const T* from, int64_t times, Channels channels, C* to) const {
    if (is_transposed_) return LoadRows(from, problem_.length, 0, times, channels, to);
    Load(from, RunsOf(times, channels), to);
  }

  void StoreTile(const C* from, int64_t times, Channels channels, T* to) const {
    if (!is_transposed_) return StoreRuns(from, RunsOf(times, channels), to);
    WithLength(times == problem_.length ? times : 0,
               [&](auto length) { StoreColumns<length>(from, problem_.length, times, channels.count, to); });
  }

  // Replaces z of a tile by its cotangent. The buffer has the size of the tile.
  void SiluGradientOfTile(const T* dy, int64_t times, Channels channels, C* buffer, C* z) const {
    if (!is_transposed_) return SiluGradient(dy, RunsOf(times, channels), z);
    LoadTile(dy, times, channels, buffer);
    SiluGradient(buffer, Runs{1, times * channels.count, 0}, z);
  }

  // Whether tiles can be read and written directly in arrays of x's shape.
  bool is_in_place() const { return std::is_same_v<T, C> && !is_transposed_; }

  // The masks from `time` on; nullptr if there are none.
  const uint8_t* SameSequence(Place place, int64_t time) const {
    if (same_sequence_ == nullptr) return nullptr;
    const int64_t example = (same_sequence_is_shared_ ? 0 : place.batch) * problem_.examples + place.example;
    return same_sequence_ + example * problem_.length + time;
  }

  // Row k, the weights of all channels, begins at k * channels.
  const C* Weights(Place place) const { return parameters_.Of(place.batch); }

  bool IsSameSequence(Place place, int64_t time, int64_t bit) const {
    return same_sequence_ == nullptr || (*SameSequence(place, time) >> bit & 1) != 0;
  }

  // The inputs of times [begin, end) in the compute type, with `stride` numbers from one time to the next. Returns x's
  // own memory if possible, otherwise fills the buffer.
  const C* Inputs(Place place, Channels channels, int64_t begin, int64_t end, C* buffer, int64_t* stride) const {
    const int64_t first = std::max<int64_t>(begin, 0);
    const T* const from = x_ + Index(x_is_shared_, place, first, channels.begin);
    if constexpr (std::is_same_v<T, C>) {
      if (begin >= 0 && is_in_place()) {
        *stride = time_stride();
        return from;
      }
    }
    *stride = channels.count;
    const int64_t before = first - begin;
    C* const to = buffer + before * channels.count;
    if (before > 0 && initial_state_.data == nullptr) {
      std::fill(buffer, to, C{0});
    } else if (before > 0) {
      const int64_t length = initial_state_.length;
      LoadRows(initial_state_.data + StateIndex(initial_state_.is_shared, place, channels.begin, length), length,
               length - before, before, channels, buffer);
    }
    if (end > first) LoadTile(from, end - first, channels, to);
    return buffer;
  }

  // z, or its silu, of `times` times from `time` on. `in` begins at the first input of the first window.
  template <bool kSilu>
  void Forward(Place place, Channels channels, const C* in, int64_t in_stride, int64_t time, int64_t times, C* z,
               int64_t z_stride) const {
    const C* const weights = Weights(place) + channels.begin;
    const C* const biases = weights + problem_.width * problem_.channels;
    Correlate<kSilu>({weights, problem_.channels, biases, SameSequence(place, time), false}, channels, in, in_stride,
                     times, times, z, z_stride);
  }

  // dx of `times` times from `time` on, without the contribution of the final state. `dz` begins at `time` too: it has
  // `gradients` times, then zeros up to the end of the last window.
  void Transpose(Place place, Channels channels, const C* dz, int64_t time, int64_t gradients, int64_t times, C* dx,
                 int64_t dx_stride) const {
    static constexpr C kZeros[kMaxChannels] = {};
    const C* const last_weights = Weights(place) + channels.begin + reach() * problem_.channels;
    Correlate<false>({last_weights, -problem_.channels, kZeros, SameSequence(place, time), true}, channels, dz,
                     channels.count, gradients, times, dx, dx_stride);
  }

  // Adds to the sums for the weights and the bias: one row of all channels per tap, then one for the bias.
  void SumProducts(Place place, Channels channels, const C* in, int64_t in_stride, const C* dz, int64_t time,
                   int64_t times, double* sums) const {
    const uint8_t* const masks = SameSequence(place, time);
    sums += channels.begin;
    const int64_t stride = problem_.channels;
    double* const sums_of_dz = sums + problem_.width * stride;
    ForEachRunOfTimes(
        masks, false, times, times,
        [&](int64_t begin, int64_t end) {
          const C* const first_dz = dz + begin * channels.count;
          for (int first = 0; first < problem_.width; first += kMaxConstantWidth) {
            DispatchWidth(std::min(problem_.width - first, kMaxConstantWidth), [&](auto width) {
              const C* const first_in = in + (begin + first) * in_stride;
              double* const to = sums + first * stride;
              double* const to_dz = first == 0 ? sums_of_dz : nullptr;
              if (has_channels_) {
                SumProductsChannels<width>(first_in, in_stride, first_dz, end - begin, channels.count, to, stride,
                                           to_dz);
              } else {
                SumProductsTimes<width>(first_in, first_dz, end - begin, to, stride, to_dz);
              }
            });
          }
        },
        [&](int64_t begin, int64_t end) {
          if (!has_channels_) {
            for (int k = 0; k < problem_.width; ++k) {
              SumMaskedTimes(in + begin + k, dz + begin, masks + begin, Bit(false, k), end - begin, sums + k * stride);
            }
            SumProductsTimes<0>(in, dz + begin, end - begin, sums, stride, sums_of_dz);
            return;
          }
          for (int64_t t = begin; t < end; ++t) {
            const C* const gradients = dz + t * channels.count;
            for (int k = 0; k < problem_.width; ++k) {
              if ((masks[t] >> Bit(false, k) & 1) == 0) continue;
              SumProductsOfTime(in + (t + k) * in_stride, gradients, channels.count, sums + k * stride);
            }
            SumChannels(gradients, channels.count, sums_of_dz);
          }
        });
  }

 private:
  // out[t] = bias + sum over k of weight[k] * in[t + k], for adjacent channels.
  struct Correlation {
    const C* weights;  // of the first channel
    int64_t weight_stride;
    const C* biases;
    const uint8_t* same_sequence;  // nullptr if there is none
    // If false, tap k uses bit width - 1 - k of the mask of t. If true, it uses bit k of the mask of t + k.
    bool is_transposed;
  };

  // `num_masks` is the number of times with masks.
  template <bool kSilu>
  void Correlate(const Correlation& correlation, Channels channels, const C* in, int64_t in_stride, int64_t num_masks,
                 int64_t times, C* out, int64_t out_stride) const {
    const uint8_t* const masks = correlation.same_sequence;
    const bool is_transposed = correlation.is_transposed;
    const C* const weights = correlation.weights;
    const int64_t weight_stride = correlation.weight_stride;
    ForEachRunOfTimes(
        masks, is_transposed, num_masks, times,
        [&](int64_t begin, int64_t end) {
          const C* const first_in = in + begin * in_stride;
          C* const first_out = out + begin * out_stride;
          if (problem_.width > kMaxConstantWidth) {
            CorrelateWide<kSilu>(correlation, channels, first_in, in_stride, end - begin, first_out, out_stride);
            return;
          }
          DispatchWidth(problem_.width, [&](auto width) {
            if (has_channels_) {
              CorrelateChannels<width, kSilu>(first_in, in_stride, weights, weight_stride, correlation.biases,
                                              end - begin, channels.count, first_out, out_stride);
            } else {
              CorrelateTimes<width, kSilu>(first_in, weights, weight_stride, *correlation.biases, end - begin,
                                           first_out);
            }
          });
        },
        [&](int64_t begin, int64_t end) {
          if (!has_channels_) {
            std::fill(out + begin, out + end, *correlation.biases);
            for (int k = 0; k < problem_.width; ++k) {
              const int64_t first_mask = is_transposed ? begin + k : begin;
              AddMaskedTimes(in + begin + k, weights[k * weight_stride], masks + first_mask, Bit(is_transposed, k),
                             std::min(end - begin, num_masks - first_mask), out + begin);
            }
            if (kSilu) ApplySilu(end - begin, out + begin);
            return;
          }
          for (int64_t t = begin; t < end; ++t) {
            C* const to = out + t * out_stride;
            std::copy_n(correlation.biases, channels.count, to);
            for (int k = 0; k < problem_.width; ++k) {
              const int64_t mask = is_transposed ? t + k : t;
              if (mask >= num_masks || (masks[mask] >> Bit(is_transposed, k) & 1) == 0) continue;
              AddChannels(in + (t + k) * in_stride, weights + k * weight_stride, channels.count, to);
            }
            if (kSilu) ApplySilu(channels.count, to);
          }
        });
  }

  // For widths above kMaxConstantWidth and full masks: the first taps with a constant width, then one tap at a time.
  template <bool kSilu>
  void CorrelateWide(const Correlation& correlation, Channels channels, const C* in, int64_t in_stride, int64_t times,
                     C* out, int64_t out_stride) const {
    constexpr int kWidth = kMaxConstantWidth;
    const C* const weights = correlation.weights;
    const int64_t weight_stride = correlation.weight_stride;
    if (!has_channels_) {
      CorrelateTimes<kWidth, false>(in, weights, weight_stride, *correlation.biases, times, out);
      for (int k = kWidth; k < problem_.width; ++k) AddTimes(in + k, weights[k * weight_stride], times, out);
      if (kSilu) ApplySilu(times, out);
      return;
    }
    for (int64_t t = 0; t < times; ++t, in += in_stride, out += out_stride) {
      CorrelateChannels<kWidth, false>(in, in_stride, weights, weight_stride, correlation.biases, 1, channels.count,
                                       out, out_stride);
      for (int k = kWidth; k < problem_.width; ++k) {
        AddChannels(in + k * in_stride, weights + k * weight_stride, channels.count, out);
      }
      if (kSilu) ApplySilu(channels.count, out);
    }
  }

  int Bit(bool is_transposed, int k) const { return is_transposed ? k : problem_.width - 1 - k; }

  // Calls whole(begin, end) for runs of times whose windows are inside one sequence, and broken(begin, end) for others.
  template <typename Whole, typename Broken>
  void ForEachRunOfTimes(const uint8_t* masks, bool is_transposed, int64_t num_masks, int64_t times, const Whole& whole,
                         const Broken& broken) const {
    const auto is_whole = [&](int64_t begin, int64_t end) {
      const int64_t end_mask = is_transposed ? std::min(end + reach(), num_masks) : end;
      return AllEqual(masks + begin, end_mask - begin, (1 << problem_.width) - 1);
    };
    if (masks == nullptr || is_whole(0, times)) return whole(int64_t{0}, times);
    const int64_t step = has_channels_ ? 1 : kBlockTimes;
    for (int64_t begin = 0; begin < times;) {
      int64_t end = begin;
      while (end < times && is_whole(end, std::min(end + step, times))) end = std::min(end + step, times);
      if (end > begin) whole(begin, end);
      begin = std::min(end + step, times);
      if (begin > end) broken(end, begin);
    }
  }

  Runs RunsOf(int64_t times, Channels channels) const {
    return problem_.channels_last ? Runs{times, channels.count, problem_.channels} : Runs{1, times, 0};
  }

  // Transposes numbers [begin, begin + times) of each channel's row of `length` numbers to [times, channels].
  static void LoadRows(const T* rows, int64_t length, int64_t begin, int64_t times, Channels channels, C* to) {
    WithLength(length, [&](auto constant_length) {
      LoadColumns<constant_length>(rows, length, begin, times, channels.count, to);
    });
  }

  const Problem problem_;
  const T* const x_;
  const bool x_is_shared_;
  const InitialState<T> initial_state_;
  const uint8_t* const same_sequence_;
  const bool same_sequence_is_shared_;
  const Parameters<C>& parameters_;
  const bool is_transposed_;  // whether tiles are transposed relative to arrays of x's shape
  const bool has_channels_;
};

// ---------------------------------------------------------------------------------------------------------------------
// The forward pass.

// Returns false if an allocation fails.
template <typename T>
bool Forward(ffi::ThreadPool& pool, const ForwardCall& call, const Convolution<T>& convolution) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  T* const y = static_cast<T*>(call.y);
  if (problem.HasNoElement()) return true;
  const int64_t times = convolution.tile_times(), channels = convolution.TileChannels(/*num_tiles=*/1);
  const int64_t time_tiles = CeilDivide(problem.length, times);
  const int64_t channel_tiles = CeilDivide(problem.channels, channels);
  const int64_t bytes =
      problem.batch * problem.examples * problem.channels * problem.length * static_cast<int64_t>(sizeof(T));
  AdviseHugePages(y, bytes);
  struct Tile {
    Place place;
    typename Convolution<T>::Channels channels;
    int64_t time, times;
  };
  // Tiles are numbered in memory order.
  const auto tile_of = [&](int64_t index) {
    const int64_t place_index = index / (time_tiles * channel_tiles), in_place = index % (time_tiles * channel_tiles);
    const bool has_channels = convolution.has_channels();
    const int64_t time = (has_channels ? in_place / channel_tiles : in_place % time_tiles) * times;
    const int64_t channel = (has_channels ? in_place % channel_tiles : in_place / time_tiles) * channels;
    return Tile{{place_index / problem.examples, place_index % problem.examples},
                {channel, std::min(channels, problem.channels - channel)},
                time,
                std::min(times, problem.length - time)};
  };
  std::atomic<bool> has_memory{true};
  ForEachRange(pool, problem.batch * problem.examples * time_tiles * channel_tiles, bytes,
               [&](int64_t tile_begin, int64_t tile_end) {
                 Lines<C> memory;
                 if (!memory.Allocate((times + convolution.reach() + times) * channels)) {
                   has_memory = false;
                   return;
                 }
                 C* const inputs = memory.get();
                 for (int64_t index = tile_begin; index < tile_end; ++index) {
                   const Tile tile = tile_of(index);
                   int64_t stride;
                   const C* const in = convolution.Inputs(tile.place, tile.channels, tile.time - convolution.reach(),
                                                          tile.time + tile.times, inputs, &stride);
                   T* const to = y + convolution.Index(/*is_shared=*/false, tile.place, tile.time, tile.channels.begin);
                   const auto compute = [&](C* out, int64_t out_stride) {
                     if (problem.silu) {
                       convolution.template Forward<true>(tile.place, tile.channels, in, stride, tile.time, tile.times,
                                                          out, out_stride);
                     } else {
                       convolution.template Forward<false>(tile.place, tile.channels, in, stride, tile.time, tile.times,
                                                           out, out_stride);
                     }
                   };
                   if constexpr (std::is_same_v<T, C>) {
                     if (convolution.is_in_place()) {
                       compute(to, convolution.time_stride());
                       continue;
                     }
                   }
                   C* const numbers = inputs + (times + convolution.reach()) * channels;
                   compute(numbers, tile.channels.count);
                   convolution.StoreTile(numbers, tile.times, tile.channels, to);
                 }
               });
  return has_memory;
}

// ---------------------------------------------------------------------------------------------------------------------
// The backward pass.

template <typename T>
struct Gradients {
  const T* dy;
  bool dy_is_shared;
  const T* d_final_state;  // nullptr if there is none
  bool d_final_state_is_shared;
  T* dx;
  T* d_initial_state;  // nullptr if there is no initial state

  explicit Gradients(const BackwardCall& call)
      : dy(static_cast<const T*>(call.dy.data)),
        dy_is_shared(call.dy.is_shared),
        d_final_state(static_cast<const T*>(call.d_final_state.data)),
        d_final_state_is_shared(call.d_final_state.is_shared),
        dx(static_cast<T*>(call.dx)),
        d_initial_state(static_cast<T*>(call.d_initial_state)) {}
};

template <typename T>
class Backward {
 public:
  using C = ComputeType<T>;
  using Channels = typename Convolution<T>::Channels;

  Backward(const Problem& problem, const Convolution<T>& convolution, const Gradients<T>& gradients)
      : problem_(problem), convolution_(convolution), gradients_(gradients) {}

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
  void Run(Place place, Channels channels, int64_t begin, int64_t end, double* sums) {
    const int64_t reach = convolution_.reach(), length = problem_.length;
    int64_t known = 0;  // the number of times of dz, from the tile's first on, that the previous tile computed
    for (int64_t time = begin; time < end; time += convolution_.tile_times()) {
      const int64_t times = std::min(convolution_.tile_times(), end - time);
      const int64_t wanted = std::min(times + reach, length - time);
      int64_t stride;
      const C* const in = convolution_.Inputs(place, channels, time - reach, time + wanted, inputs_, &stride);
      C* const next = dz_ + known * channels.count;
      const T* const dy =
          gradients_.dy + convolution_.Index(gradients_.dy_is_shared, place, time + known, channels.begin);
      if (problem_.silu) {
        convolution_.template Forward<false>(place, channels, in + known * stride, stride, time + known, wanted - known,
                                             next, channels.count);
        convolution_.SiluGradientOfTile(dy, wanted - known, channels, dx_, next);
      } else {
        convolution_.LoadTile(dy, wanted - known, channels, next);
      }
      std::fill(dz_ + wanted * channels.count, dz_ + (times + reach) * channels.count, C{0});
      convolution_.SumProducts(place, channels, in, stride, dz_, time, times, sums);
      T* const to = gradients_.dx + convolution_.Index(/*is_shared=*/false, place, time, channels.begin);
      C* dx = dx_;
      int64_t dx_stride = channels.count;
      if constexpr (std::is_same_v<T, C>) {
        if (convolution_.is_in_place()) {
          dx = to;
          dx_stride = convolution_.time_stride();
        }
      }
      convolution_.Transpose(place, channels, dz_, time, wanted, times, dx, dx_stride);
      AddFinalState(place, channels, time, times, dx, dx_stride);
      if (dx == dx_) convolution_.StoreTile(dx, times, channels, to);
      if (time == 0) WriteInitialState(place, channels, wanted);
      known = std::max<int64_t>(wanted - times, 0);
      std::copy_n(dz_ + times * channels.count, known * channels.count, dz_);
    }
  }

  // Writes d_initial_state from dz of the first `gradients` times: all times, or all whose windows include the state.
  void WriteInitialState(Place place, Channels channels, int64_t gradients) const {
    if (gradients_.d_initial_state == nullptr) return;
    const int64_t reach = convolution_.reach(), stride = problem_.channels;
    T* to = gradients_.d_initial_state + convolution_.StateIndex(/*is_shared=*/false, place, channels.begin, reach);
    for (int64_t c = 0; c < channels.count; ++c) {
      const C* const weights = convolution_.Weights(place) + channels.begin + c;
      for (int64_t i = 0; i < reach; ++i, ++to) {
        const int64_t time = i - reach;
        C sum = FinalState(place, channels.begin + c, time);
        for (int64_t bit = -time; bit <= reach && time + bit < gradients; ++bit) {
          if (!convolution_.IsSameSequence(place, time + bit, bit)) continue;
          sum += weights[(reach - bit) * stride] * dz_[(time + bit) * channels.count + c];
        }
        Store(sum, to);
      }
    }
  }

 private:
  // The contribution of d_final_state to dx, or d_initial_state, at a time.
  C FinalState(Place place, int64_t channel, int64_t time) const {
    const int64_t reach = convolution_.reach(), i = time - (problem_.length - reach);
    if (gradients_.d_final_state == nullptr || i < 0) return C{0};
    if (problem_.length > 0 && !convolution_.IsSameSequence(place, problem_.length - 1, reach - 1 - i)) return C{0};
    const int64_t first = convolution_.StateIndex(gradients_.d_final_state_is_shared, place, channel, reach);
    return static_cast<C>(gradients_.d_final_state[first + i]);
  }

  void AddFinalState(Place place, Channels channels, int64_t time, int64_t times, C* dx, int64_t stride) const {
    if (gradients_.d_final_state == nullptr) return;
    for (int64_t t = std::max(time, problem_.length - convolution_.reach()); t < time + times; ++t) {
      C* const to = dx + (t - time) * stride;
      for (int64_t c = 0; c < channels.count; ++c) to[c] += FinalState(place, channels.begin + c, t);
    }
  }

  const Problem problem_;
  const Convolution<T>& convolution_;
  const Gradients<T> gradients_;
  Lines<C> memory_;
  C* inputs_ = nullptr;
  C* dz_ = nullptr;
  C* dx_ = nullptr;
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

// Returns false if an allocation fails.
template <typename T>
bool ComputeGradients(ffi::ThreadPool& pool, const BackwardCall& call, const Convolution<T>& convolution) {
  const Problem& problem = call.problem;
  const Gradients<T> gradients(call);
  if (problem.batch == 0 || problem.channels == 0) return true;
  const int64_t bytes =
      problem.batch * problem.examples * problem.channels * problem.length * static_cast<int64_t>(sizeof(T));
  AdviseHugePages(gradients.dx, bytes);
  // A chunk is a range of times of an example. Chunks are grouped into parts. Each part has its own sums, and its
  // chunks are added in order. The split of channels among threads does not affect the sums.
  const int64_t chunk_times = convolution.has_channels() ? kChunkTimes : kChunkTimesOfChannel;
  const int64_t chunks_per_example = std::max<int64_t>(1, CeilDivide(problem.length, chunk_times));
  const int64_t chunks = problem.examples * chunks_per_example;
  const int64_t units = CeilDivide(problem.channels, convolution.has_channels() ? kMinChannels : 1);
  const int64_t parts = std::clamp<int64_t>(kMaxParts / (problem.batch * units), 1, std::max<int64_t>(1, chunks));
  const int64_t tile_channels =
      convolution.TileChannels(CeilDivide(4 * std::max<int64_t>(1, pool.num_threads()), problem.batch * parts));
  const int64_t channel_tiles = CeilDivide(problem.channels, tile_channels);
  const int64_t num_sums = parts * problem.batch * (problem.width + 1) * problem.channels;
  const std::unique_ptr<double[]> sums(new (std::nothrow) double[num_sums]());
  if (sums == nullptr) return false;
  std::atomic<bool> has_memory{true};
  ForEachRange(pool, problem.batch * parts * channel_tiles, 2 * bytes, [&](int64_t begin, int64_t end) {
    Backward<T> backward(problem, convolution, gradients);
    if (!backward.Allocate(tile_channels)) {
      has_memory = false;
      return;
    }
    while (begin < end) {
      const int64_t row = begin / channel_tiles, batch = row / parts, part = row % parts;
      const int64_t first_tile = begin % channel_tiles;
      const int64_t end_tile = std::min(channel_tiles, first_tile + end - begin);
      double* const of_part = sums.get() + (part * problem.batch + batch) * (problem.width + 1) * problem.channels;
      for (int64_t chunk = ChunkBegin(chunks, parts, part); chunk < ChunkBegin(chunks, parts, part + 1); ++chunk) {
        const Place place{batch, chunk / chunks_per_example};
        const int64_t time = chunk % chunks_per_example * chunk_times;
        for (int64_t tile = first_tile; tile < end_tile; ++tile) {
          const int64_t channel = tile * tile_channels;
          const typename Convolution<T>::Channels channels{channel,
                                                           std::min(tile_channels, problem.channels - channel)};
          backward.Run(place, channels, time, std::min(time + chunk_times, problem.length), of_part);
          if (problem.length == 0) backward.WriteInitialState(place, channels, 0);
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

// The last `state_length` inputs of the old state followed by x. new_state may alias the old state.
template <typename T>
void WriteNewState(ffi::ThreadPool& pool, const UpdateCall& call, Strategy strategy,
                   const Convolution<T>& convolution) {
  const Problem& problem = call.problem;
  const T* const x = static_cast<const T*>(call.x.data);
  const T* const state = static_cast<const T*>(call.initial_state.data);
  T* const new_state = static_cast<T*>(call.new_state);
  const int64_t length = call.state_length, kept = std::max<int64_t>(0, length - problem.length);
  const int64_t rows = problem.batch * problem.examples * problem.channels;
  ForEachRange(pool, rows, rows * length * static_cast<int64_t>(sizeof(T)), [&](int64_t row_begin, int64_t row_end) {
    for (int64_t row = row_begin; row < row_end;) {
      const int64_t place_index = row / problem.channels, channel = row % problem.channels;
      const Place place{place_index / problem.examples, place_index % problem.examples};
      const T* const old = state + convolution.StateIndex(call.initial_state.is_shared, place, channel, length);
      T* const to = new_state + row * length;
      if (strategy == Strategy::kOneInput) {
        const int64_t channels = std::min(problem.channels - channel, row_end - row);
        const T* const from = x + convolution.Index(call.x.is_shared, place, 0, channel);
        WithLength(length, [&](auto count) { ShiftStates<count>(old, length, from, channels, to); });
        row += channels;
        continue;
      }
      ++row;
      std::memmove(static_cast<void*>(to), old + (length - kept), static_cast<size_t>(kept) * sizeof(T));
      if (kept == length) continue;
      const T* const from = x + convolution.Index(call.x.is_shared, place, problem.length - (length - kept), channel);
      for (int64_t i = kept; i < length; ++i) to[i] = from[(i - kept) * convolution.time_stride()];
    }
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Running calls.

// Calls run(call, convolution), which returns false if an allocation fails. `problem` is the call's, in its best
// layout.
template <typename Call, typename Run>
ffi::Error RunCall(const char* op, ffi::ThreadPool& pool, Call call, const Problem& problem, Strategy strategy,
                   const Run& run) {
  if (strategy == Strategy::kNothing) return ffi::Error::Success();
  call.problem = problem;
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Parameters<ComputeType<T>> parameters;
    has_memory = parameters.Prepare(pool, call.problem, call.weight, call.bias) &&
                 run(call, Convolution<T>(call, strategy, parameters));
  });
  return MemoryStatus(op, has_memory);
}

ffi::Error RunForward(ffi::ThreadPool pool, const ForwardCall& forward_call) {
  const Problem problem = WithBestLayout(forward_call.problem);
  const Strategy strategy = ChooseForward(problem, ElementBytes(forward_call.type));
  return RunCall(kForwardName, pool, forward_call, problem, strategy,
                 [&](const ForwardCall& call, const auto& convolution) { return Forward(pool, call, convolution); });
}

ffi::Error RunBackward(ffi::ThreadPool pool, BackwardCall* backward_call, ffi::RemainingRets more_results,
                       size_t num_decoded) {
  if (more_results.size() != num_decoded) {
    return InvalidArgument(kBackwardName, "got " + std::to_string(3 + more_results.size()) + " results, expected " +
                                              std::to_string(3 + num_decoded));
  }
  const Problem problem = WithBestLayout(backward_call->problem);
  const Strategy strategy = ChooseBackward(problem, ElementBytes(backward_call->type));
  return RunCall(
      kBackwardName, pool, *backward_call, problem, strategy,
      [&](const BackwardCall& call, const auto& convolution) { return ComputeGradients(pool, call, convolution); });
}

ffi::Error RunUpdate(ffi::ThreadPool pool, const UpdateCall& update_call) {
  const Problem problem = WithBestLayout(update_call.problem);
  const Strategy strategy = ChooseUpdate(problem, ElementBytes(update_call.type), update_call.state_length);
  return RunCall(kUpdateName, pool, update_call, problem, strategy,
                 [&](const UpdateCall& call, const auto& convolution) {
                   if (!Forward(pool, call, convolution)) return false;
                   WriteNewState(pool, call, strategy, convolution);  // last: it may overwrite the old state
                   return true;
                 });
}

Plan PlanForward(const PlanParameters& parameters) {
  return Plan{
      NameOf(kStrategyNames, ChooseForward(WithBestLayout(ProblemOf(parameters)), parameters.at("element_bytes")))};
}

Plan PlanBackward(const PlanParameters& parameters) {
  return Plan{
      NameOf(kStrategyNames, ChooseBackward(WithBestLayout(ProblemOf(parameters)), parameters.at("element_bytes")))};
}

Plan PlanUpdate(const PlanParameters& parameters) {
  return Plan{NameOf(kStrategyNames, ChooseUpdate(WithBestLayout(ProblemOf(parameters)), parameters.at("element_bytes"),
                                                  parameters.at("state_length")))};
}

JB_CPU_TARGET(kForwardName, (HandleForward<ffi::ThreadPool, RunForward>), BindForward<ffi::ThreadPool>(), PlanForward,
              kStrategyNames, kStrategyNames + kForwardStrategies);
JB_CPU_TARGET(kBackwardName, (HandleBackward<ffi::ThreadPool, RunBackward>), BindBackward<ffi::ThreadPool>(),
              PlanBackward, kStrategyNames, kStrategyNames + kBackwardStrategies);
JB_CPU_TARGET(kUpdateName, (HandleUpdate<ffi::ThreadPool, RunUpdate>), BindUpdate<ffi::ThreadPool>(), PlanUpdate,
              "nothing", "rows", "transposed_rows", "channels_last", "no_inputs", "one_input");

}  // namespace
}  // namespace jax_baracuda::causal_conv1d
