#include "ffi/causal_conv1d/tiles_cpu.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/core/alignment.h"
#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/element_type.h"
#include "ffi/core/exp_cpu.h"
#include "ffi/core/float16_cpu.h"

namespace jax_baracuda::causal_conv1d {
namespace {

// Masks are checked in blocks of this many times. A block with all bits set takes the fast path.
constexpr int64_t kBlockTimesOfChannel = 64, kBlockTimes = 1;

template <typename C>
JB_INLINE C Silu(C z) {
  return z / (C{1} + ExpOrZero(-z));
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

// kLength is 0 or the length.
template <int kLength, typename T>
JB_CPU_CLONES void ShiftStatesOfLength(const T* old_states, int64_t length, const T* x, int64_t channels,
                                       T* new_states) {
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

template <int kWidth, bool kOverTimes, bool kSilu, typename C>
JB_CPU_CLONES void CorrelateWhole(const C* __restrict in, int64_t in_stride, const C* __restrict weights,
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
  static constexpr int64_t kCount = kCacheLine / sizeof(C);
  typedef C Type __attribute__((vector_size(kCacheLine)));
};

// Adds the sum over t of dz[t, c] * in[t + k, c] to sums[k, c], and the sum of dz to sums_of_dz[c] unless that is
// nullptr. dz has no gaps. The order of the sums is fixed.
template <int kWidth, bool kOverTimes, typename C>
JB_CPU_CLONES void SumProductsOfTaps(View<const C> in, const C* dz, int64_t times, int64_t channels, View<double> sums,
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

// Calls body(begin, end, has_masks) for runs of times. Runs without masks have all taps in one sequence.
template <typename Body>
void ForEachRun(const Tile& tile, const Masks& masks, const Body& body) {
  const auto is_whole = [&](int64_t begin, int64_t end) {
    const int64_t end_mask = masks.is_transposed ? std::min(end + tile.width - 1, masks.count) : end;
    return AllEqual(masks.data + begin, end_mask - begin, (1 << tile.width) - 1);
  };
  if (masks.data == nullptr || is_whole(0, tile.times)) return body(int64_t{0}, tile.times, false);
  const int64_t step = tile.over_times ? kBlockTimesOfChannel : kBlockTimes;
  bool next_has_masks = !is_whole(0, std::min(step, tile.times));
  for (int64_t begin = 0, end = 0; begin < tile.times; begin = end) {
    const bool has_masks = next_has_masks;
    do {
      end = std::min(end + step, tile.times);
      if (end < tile.times) next_has_masks = !is_whole(end, std::min(end + step, tile.times));
    } while (end < tile.times && next_has_masks == has_masks);
    body(begin, end, has_masks);
  }
}

// Calls body(std::bool_constant<kOverTimes>{}).
template <typename Body>
void OverTimes(const Tile& tile, const Body& body) {
  tile.over_times ? body(std::true_type{}) : body(std::false_type{});
}

}  // namespace

template <typename T, typename C>
JB_CPU_CLONES void SiluGradient(const T* d_output, int64_t count, C* z) {
  ForEachPart(d_output, count, [&](int64_t begin, int64_t part, const auto* numbers) __attribute__((always_inline)) {
    C* const of_part = z + begin;
    JB_VECTORIZE
    for (int64_t i = 0; i < part; ++i) {
      const C exponential = ExpOrZero(-of_part[i]), sigmoid = C{1} / (C{1} + exponential);
      const C of_negative = of_part[i] < C{0} ? C{1} - sigmoid : exponential * sigmoid;  // sigmoid(-z)
      of_part[i] = static_cast<C>(numbers[i]) * (sigmoid * (C{1} + of_part[i] * of_negative));
    }
  });
}

template <typename T, typename C>
void LoadRows(const T* rows, int64_t length, int64_t begin, int64_t times, int64_t channels, C* to) {
  WithLength(length, [&](auto constant) { LoadColumns<constant>(rows, length, begin, times, channels, to); });
}

template <typename T, typename C>
void StoreRows(const C* from, int64_t length, int64_t times, int64_t channels, T* rows) {
  WithLength(times == length ? length : 0,
             [&](auto constant) { StoreColumns<constant>(from, length, times, channels, rows); });
}

template <typename T>
void ShiftStates(const T* old_states, int64_t length, const T* x, int64_t channels, T* new_states) {
  WithLength(length,
             [&](auto constant) { ShiftStatesOfLength<constant>(old_states, length, x, channels, new_states); });
}

template <typename C>
void Correlate(const Tile& tile, View<const C> in, View<const C> weights, const C* biases, const Masks& masks,
               bool silu, View<C> out) {
  ForEachRun(tile, masks, [&](int64_t begin, int64_t end, bool has_masks) {
    OverTimes(tile, [&](auto over_times) {
      const auto add_taps = [&](int first_tap, const Masks& of_run) {
        for (int k = first_tap; k < tile.width; ++k) {
          const int later = of_run.is_transposed ? k : 0, bit = of_run.is_transposed ? k : tile.width - 1 - k;
          const uint8_t* const of_tap = of_run.data == nullptr ? nullptr : of_run.data + later;
          AddTap<over_times>(in.From(begin + k).data, in.stride, weights.From(k).data, of_tap, of_run.count - later,
                             bit, end - begin, tile.channels, out.From(begin).data, out.stride);
        }
        if (!silu) return;
        const int64_t rows = over_times ? 1 : end - begin, columns = over_times ? end - begin : tile.channels;
        for (int64_t row = 0; row < rows; ++row) ApplySilu(out.From(begin + row).data, columns);
      };
      if (has_masks) {
        if (over_times) {
          std::fill(out.From(begin).data, out.From(end).data, *biases);
        } else {
          for (int64_t t = begin; t < end; ++t) std::copy_n(biases, tile.channels, out.From(t).data);
        }
        return add_taps(0, masks.From(begin));
      }
      const bool is_wide = tile.width > kMaxConstantWidth;
      DispatchWidth(std::min(tile.width, kMaxConstantWidth), [&](auto width) {
        const auto run = [&](auto with_silu) {
          CorrelateWhole<width, over_times, with_silu>(in.From(begin).data, in.stride, weights.data, weights.stride,
                                                       biases, end - begin, tile.channels, out.From(begin).data,
                                                       out.stride);
        };
        silu && !is_wide ? run(std::true_type{}) : run(std::false_type{});
      });
      if (is_wide) add_taps(kMaxConstantWidth, {nullptr, 0, false});
    });
  });
}

template <typename C>
void SumProducts(const Tile& tile, View<const C> in, const C* dz, const Masks& masks, View<double> sums) {
  ForEachRun(tile, masks, [&](int64_t begin, int64_t end, bool has_masks) {
    const View<const C> first = in.From(begin);
    const C* const first_dz = dz + begin * tile.channels;
    double* const sums_of_dz = sums.From(tile.width).data;
    OverTimes(tile, [&](auto over_times) {
      if (has_masks) {
        const auto sum = [&](auto of_tap, int k, double* to) {
          SumTap<over_times, of_tap>(first.From(k).data, first.stride, first_dz, masks.data + begin, tile.width - 1 - k,
                                     end - begin, tile.channels, to);
        };
        for (int k = 0; k < tile.width; ++k) sum(std::true_type{}, k, sums.From(k).data);
        return sum(std::false_type{}, 0, sums_of_dz);
      }
      for (int tap = 0; tap < tile.width; tap += kMaxConstantWidth) {
        DispatchWidth(std::min(tile.width - tap, kMaxConstantWidth), [&](auto width) {
          SumProductsOfTaps<width, over_times>(first.From(tap), first_dz, end - begin, tile.channels, sums.From(tap),
                                               tap == 0 ? sums_of_dz : nullptr);
        });
      }
    });
  });
}

// NOLINTBEGIN(bugprone-macro-parentheses): the arguments are types.
// Parameters may have the compute type where x has 16 bits, so that C is a type of rows, too.
#define JB_TILES_OF(T, C)                                                                                       \
  template void LoadRows(const T* rows, int64_t length, int64_t begin, int64_t times, int64_t channels, C* to); \
  template void StoreRows(const C* from, int64_t length, int64_t times, int64_t channels, T* rows);             \
  template void ShiftStates(const T* old_states, int64_t length, const T* x, int64_t channels, T* new_states);  \
  template void SiluGradient(const T* d_output, int64_t count, C* z);
JB_TILES_OF(Float16, float)
JB_TILES_OF(BFloat16, float)
JB_TILES_OF(float, float)
JB_TILES_OF(double, double)
#undef JB_TILES_OF
// NOLINTEND(bugprone-macro-parentheses)

#define JB_TILES_OF(C)                                                                                       \
  template void Correlate(const Tile&, View<const C>, View<const C>, const C*, const Masks&, bool, View<C>); \
  template void SumProducts(const Tile&, View<const C>, const C*, const Masks&, View<double>);
JB_TILES_OF(float)
JB_TILES_OF(double)
#undef JB_TILES_OF

}  // namespace jax_baracuda::causal_conv1d
