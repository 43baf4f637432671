// Shared by the CUDA kernels of causal_conv1d: arguments, masks of sequences, and the activation.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/vectors.cuh"

namespace jax_baracuda::causal_conv1d {

// Except in UpdateOne, the kernels of kWidth = kMaxWidth serve all widths above kMaxConstantWidth. The actual taps are
// the last ones of kMaxWidth; the taps before them are masked out, like inputs of another sequence.
template <int kWidth>
inline constexpr bool kIsWide = kWidth > kMaxConstantWidth;

// Calls body(std::integral_constant<int, kWidth>{}, std::bool_constant<has masks>{}), which returns a CudaStatus, with
// the kWidth of the kernels for `width`.
template <typename Body>
CudaStatus DispatchKernel(int width, bool has_masks, const Body& body) {
  if (width > kMaxConstantWidth) return body(std::integral_constant<int, kMaxWidth>{}, std::true_type{});
  return DispatchWidth(width, [&](auto constant_width) {
    return has_masks ? body(constant_width, std::true_type{}) : body(constant_width, std::false_type{});
  });
}

// Examples are numbered through the whole batch: example = batch index * examples per batch element + index in it.
struct Geometry {
  int64_t all_examples, channels, length;
  Divider examples_of_batch, by_channels, by_length;
  int width;

  Geometry() = default;
  explicit Geometry(const Problem& problem)
      : all_examples(problem.batch * problem.examples),
        channels(problem.channels),
        length(problem.length),
        examples_of_batch(problem.examples),
        by_channels(problem.channels),
        by_length(problem.length),
        width(problem.width) {}

  // The number of taps that a kernel of kWidth leaves out, and the mask bits of the other taps.
  template <int kWidth>
  __device__ __forceinline__ int LeftOut() const {
    return kIsWide<kWidth> ? kWidth - width : 0;
  }
  template <int kWidth>
  __device__ __forceinline__ uint32_t TapBits() const {
    return kIsWide<kWidth> ? (1u << width) - 1 : ~0u;
  }
};

template <typename T>
struct Input {
  const T* data = nullptr;
  bool is_shared = false;  // by a batch of more than one. Other batches need no division.

  Input() = default;
  Input(const Problem& problem, const BatchOperand& operand)
      : data(static_cast<const T*>(operand.data)),
        is_shared(problem.batch > 1 && operand.data != nullptr && operand.is_shared) {}

  // The example to read for an example of the whole batch.
  __device__ __forceinline__ int64_t Example(const Geometry& geometry, int64_t example) const {
    if (!is_shared) return example;
    const Divider& by_examples = geometry.examples_of_batch;
    return example - by_examples.Quotient(example) * static_cast<int64_t>(by_examples.divisor);
  }
};

// Weights or biases, of x's type T or its compute type.
template <typename T>
struct Parameters {
  using C = ComputeType<T>;

  const void* data = nullptr;
  bool is_narrow = false;
  bool is_batched = false;

  Parameters() = default;
  Parameters(const Problem& problem, const Parameter& parameter, ElementType type)
      : data(parameter.data),
        is_narrow(sizeof(T) != sizeof(C) && parameter.type == type),
        is_batched(problem.batch > 1 && !parameter.is_shared) {}

  // The row of [batch, channels] that belongs to a channel of an example.
  __device__ __forceinline__ int64_t Row(const Geometry& geometry, int64_t example, int64_t channel) const {
    if (!is_batched) return channel;
    return geometry.examples_of_batch.Quotient(example) * geometry.channels + channel;
  }

  // Calls body(data) with a pointer to the actual type.
  template <typename Body>
  __device__ __forceinline__ void WithType(const Body& body) const {
    if (sizeof(T) != sizeof(C) && is_narrow) {
      body(static_cast<const T*>(data));
    } else {
      body(static_cast<const C*>(data));
    }
  }

  // One value; zero if the operand is absent.
  __device__ __forceinline__ C LoadOptional(int64_t index) const {
    C value = 0;
    if (data != nullptr) WithType([&](const auto* numbers) { value = static_cast<C>(numbers[index]); });
    return value;
  }
};

// kCount numbers in their memory format, kUnit per word.
template <typename P, int kCount, int kUnit>
struct PackedNumbers {
  Packed<P, kUnit> words[kCount / kUnit] = {};

  __device__ __forceinline__ void Load(const P* address) {
    static_assert(kCount % kUnit == 0);
#pragma unroll
    for (int i = 0; i < kCount / kUnit; ++i) words[i] = LoadPacked<kUnit>(address + i * kUnit);
  }

  __device__ __forceinline__ void WidenTo(ComputeType<P>* values) const {
#pragma unroll
    for (int i = 0; i < kCount / kUnit; ++i) Widen<P, kUnit>(words[i], values + i * kUnit);
  }
};

template <typename T>
struct Weights {
  using C = ComputeType<T>;

  Parameters<T> weight, bias;

  // Loads the weights [kChannels, kWidth] and biases [kChannels] of neighbouring channels. All loads are issued before
  // the first result is used. Several channels (a multiple of 8 bytes) are loaded as words: the operands must be
  // aligned to kVectorBytes, and `channel` must be a multiple of kChannels.
  template <int kChannels, int kWidth>
  __device__ __forceinline__ void Load(const Geometry& geometry, int64_t example, int64_t channel, C* weights,
                                       C* biases) const {
    if constexpr (kIsWide<kWidth>) {
      LoadWide<kChannels, kWidth>(geometry, example, channel, weights, biases);
    } else {
      LoadExact<kChannels, kWidth>(geometry, example, channel, weights, biases);
    }
  }

  // The same if there are exactly kWidth taps.
  template <int kChannels, int kWidth>
  __device__ __forceinline__ void LoadExact(const Geometry& geometry, int64_t example, int64_t channel, C* weights,
                                            C* biases) const {
    constexpr int kWeights = kChannels * kWidth;
    const int64_t weight_row = weight.Row(geometry, example, channel), bias_row = bias.Row(geometry, example, channel);
    weight.WithType([&](const auto* all_weights) {
      bias.WithType([&](const auto* all_biases) {
        PackedNumbersAt<kWeights, kChannels, decltype(all_weights)> packed_weights;
        PackedNumbersAt<kChannels, kChannels, decltype(all_biases)> packed_biases;
        packed_weights.Load(all_weights + weight_row * kWidth);
        if (all_biases != nullptr) packed_biases.Load(all_biases + bias_row);
        packed_weights.WidenTo(weights);
        packed_biases.WidenTo(biases);
      });
    });
  }

 private:
  template <int kChannels, int kWidth>
  __device__ __forceinline__ void LoadWide(const Geometry& geometry, int64_t example, int64_t channel, C* weights,
                                           C* biases) const {
    const int64_t weight_row = weight.Row(geometry, example, channel), bias_row = bias.Row(geometry, example, channel);
    const int left_out = geometry.template LeftOut<kWidth>();
#pragma unroll
    for (int v = 0; v < kChannels; ++v) {
      const int64_t first = (weight_row + v) * geometry.width;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        weights[v * kWidth + k] = k >= left_out ? weight.LoadOptional(first + k - left_out) : C{0};
      }
      biases[v] = bias.LoadOptional(bias_row + v);
    }
  }

  template <typename P, int kCount, int kChannels>
  static constexpr int kUnit =
      kChannels == 1 ? 1 : (kCount * sizeof(P) % kVectorBytes == 0 ? kVectorBytes : 8) / sizeof(P);
  template <int kCount, int kChannels, typename Address, typename P = std::decay_t<decltype(*Address{})>>
  using PackedNumbersAt = PackedNumbers<P, kCount, kUnit<P, kCount, kChannels>>;
};

// The inputs before time 0: the newest of the `length` entries in each row of a state; zeros without a state.
template <typename T>
struct InitialState {
  Input<T> entries;
  int64_t length = 0;

  // The end of a row of the state, so that End()[t] is the entry for time t < 0; nullptr without a state.
  __device__ __forceinline__ const T* End(const Geometry& geometry, int64_t example, int64_t channel) const {
    if (entries.data == nullptr) return nullptr;
    return entries.data + (entries.Example(geometry, example) * geometry.channels + channel + 1) * length;
  }
};

template <typename T>
struct ConvolutionArguments {
  Geometry geometry;
  bool silu;
  Input<T> x;
  Weights<T> weights;
  InitialState<T> initial_state;
  Input<uint8_t> same_sequence;

  explicit ConvolutionArguments(const ConvolutionCall& call)
      : geometry(call.problem),
        silu(call.problem.silu),
        x(call.problem, call.x),
        weights{{call.problem, call.weight, call.type}, {call.problem, call.bias, call.type}},
        initial_state{{call.problem, call.initial_state}, call.state_length},
        same_sequence(call.problem, call.same_sequence) {}
};

template <typename T>
struct ForwardArguments : ConvolutionArguments<T> {
  T* y;

  explicit ForwardArguments(const OutputCall& call) : ConvolutionArguments<T>(call), y(static_cast<T*>(call.y)) {}
};

template <typename T>
struct BackwardArguments : ConvolutionArguments<T> {
  Input<T> d_output;
  InitialState<T> d_final_state;
  T* dx;
  ComputeType<T>* partials;  // [batch, partial sums per channel, width + 1, channels]; the bias follows the weights

  explicit BackwardArguments(const BackwardCall& call)
      : ConvolutionArguments<T>(call),
        d_output(call.problem, call.d_output),
        d_final_state{{call.problem, call.d_final_state}, call.problem.width - 1},
        dx(static_cast<T*>(call.dx)),
        partials(static_cast<ComputeType<T>*>(call.scratch)) {}

  // The address of a channel's first value in a partial sum. Its width + 1 values are `channels` elements apart.
  __device__ __forceinline__ ComputeType<T>* Partial(int64_t example, int64_t part, int64_t parts_of_example, int width,
                                                     int64_t channel) const {
    const int64_t channels = this->geometry.channels;
    return partials + (example * parts_of_example + part) * (width + 1) * channels + channel;
  }
};

// The masks of kCount consecutive times, one byte each, packed in words. Bit 0 is always set; kernels ignore it.
template <int kCount>
struct Masks {
  static constexpr int kWords = CeilDivide(kCount, 4);
  uint32_t words[kWords];

  __device__ __forceinline__ bool Has(int i, int steps_back) const {
    return (words[i / 4] >> (8 * (i % 4) + steps_back)) & 1u;
  }
};

// The masks of a row, starting at some time. The row has `before` inputs before that time and `after` from it on.
template <int kCount>
struct MasksOfRow {
  const uint8_t* first;
  int before, after;

  // Loads the masks from `offset` on for a kernel of kWidth. Without same_sequence all bits are set, except those of
  // left-out taps. Times outside the row do not matter and get full masks. Bytes are loaded one by one, because few
  // steps need masks.
  template <int kWidth>
  __device__ __forceinline__ void Load(const Geometry& geometry, int offset, Masks<kCount>* masks) const {
    uint32_t* const words = masks->words;
#pragma unroll
    for (int w = 0; w < Masks<kCount>::kWords; ++w) words[w] = ~0u;
    if (!kIsWide<kWidth> || first != nullptr) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int place = offset + i;
        if (place >= -before && place < after)
          words[i / 4] ^= static_cast<uint32_t>(first[place] ^ 0xffu) << (8 * (i % 4));
      }
    }
    if constexpr (kIsWide<kWidth>) {
#pragma unroll
      for (int w = 0; w < Masks<kCount>::kWords; ++w) words[w] &= 0x01010101u * geometry.template TapBits<kWidth>();
    }
  }
};

// ---- Arithmetic.

// Keeps the compiler from repeating the conversion at every use of a value.
__device__ __forceinline__ void KeepWide(float& value) { asm("" : "+f"(value)); }
__device__ __forceinline__ void KeepWide(double& value) { asm("" : "+d"(value)); }

__device__ __forceinline__ double Sigmoid(double z) { return 1.0 / (1.0 + exp(-z)); }

// Within a few ulp. Exactly 0 and 1 at -infinity and infinity, where ex2 gives infinity and 0.
__device__ __forceinline__ float Sigmoid(float z) {
  float power, quotient;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
  return quotient;
}

template <typename C>
__device__ __forceinline__ C Silu(C z) {
  return z * Sigmoid(z);
}

// d_output times the derivative of silu: s (1 + z (1 - s)). Computes z - z s, which is 0 for large z, not infinity times
// 0.
template <typename C>
__device__ __forceinline__ C SiluBackward(C z, C d_output) {
  const C s = Sigmoid(z), scaled = d_output * s;
  return fma(scaled, fma(-z, s, z), scaled);
}

}  // namespace jax_baracuda::causal_conv1d
