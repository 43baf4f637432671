// Vectorised loops over tiles of convolutions on CPUs.
//
// A tile holds numbers of the compute type C, which is float or double, as [times, channels]. Loops run over the times
// of a channel (over_times, for tiles of one channel) or over the channels of a time. The convolution and its transpose
// are the same correlation over a window of times.
#pragma once

#include <cstdint>

namespace jax_baracuda::causal_conv1d {

// Numbers [times, channels] with `stride` numbers from one time to the next.
template <typename C>
struct View {
  C* data;
  int64_t stride;

  View From(int64_t time) const { return {data + time * stride, stride}; }
};

// Part of a convolution of `width` taps.
struct Tile {
  int width;
  bool over_times;
  int64_t times, channels;
};

// The masks of `count` times, from the first one of a correlation on. Without data, all bits are set. Tap k counts if
// bit width - 1 - k of the time's mask is set; if transposed, bit k of the mask k times later. Times after the last mask
// get nothing.
struct Masks {
  const uint8_t* data;
  int64_t count;
  bool is_transposed;

  Masks From(int64_t time) const { return {data + time, count - time, is_transposed}; }
};

// Transposes numbers [begin, begin + times) of each channel's row of `length` numbers to [times, channels].
template <typename T, typename C>
void LoadRows(const T* rows, int64_t length, int64_t begin, int64_t times, int64_t channels, C* to);

// Transposes a tile to the first `times` numbers of each channel's row of `length` numbers.
template <typename T, typename C>
void StoreRows(const C* from, int64_t length, int64_t times, int64_t channels, T* rows);

// Appends one input per channel to states of `length` inputs, and drops the oldest. `new_states` may alias `old_states`.
template <typename T>
void ShiftStates(const T* old_states, int64_t length, const T* x, int64_t channels, T* new_states);

// Replaces `count` numbers z by their cotangents under silu.
template <typename T, typename C>
void SiluGradient(const T* d_output, int64_t count, C* z);

// out[t, c] = biases[c] + sum over k < width of weights[k, c] * in[t + k, c], or its silu.
template <typename C>
void Correlate(const Tile& tile, View<const C> in, View<const C> weights, const C* biases, const Masks& masks,
               bool silu, View<C> out);

// Adds the sum over t of dz[t, c] * in[t + k, c] to sums[k, c], and the sum of dz to sums[width, c]. dz has no gaps. The
// order of the sums is fixed.
template <typename C>
void SumProducts(const Tile& tile, View<const C> in, const C* dz, const Masks& masks, View<double> sums);

}  // namespace jax_baracuda::causal_conv1d
