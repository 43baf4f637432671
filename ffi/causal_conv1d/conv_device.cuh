// What the CUDA kernels of causal_conv1d share: where operands lie, the taps and the activation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/causal_conv1d/causal_conv1d.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/vectors.cuh"

namespace jax_baracuda::causal_conv1d {

inline constexpr int kVectorBytes = 16;

// Calls body(TypeTag<T>{}), which returns a cudaError_t.
template <typename Body>
cudaError_t DispatchType(ElementType type, Body&& body) {
  cudaError_t error = cudaErrorInvalidValue;
  DispatchFloating(type, [&](auto tag) { error = body(tag); });
  return error;
}

// Examples are counted through the whole batch: example = batch index * examples of a batch element + its own index.
struct Geometry {
  int64_t all_examples, channels, length;
  Divider examples_of_batch, by_channels, by_length;

  Geometry() = default;
  explicit Geometry(const Problem& problem)
      : all_examples(problem.batch * problem.examples),
        channels(problem.channels),
        length(problem.length),
        examples_of_batch(problem.examples),
        by_channels(problem.channels),
        by_length(problem.length) {}
};

// Sharing means nothing to a batch of one; that saves its division.
inline bool IsShared(const Problem& problem, bool is_shared) { return is_shared && problem.batch > 1; }

template <typename T>
struct Input {
  const T* data = nullptr;
  bool is_shared = false;

  Input() = default;
  Input(const Problem& problem, const Operand& operand)
      : data(static_cast<const T*>(operand.data)), is_shared(IsShared(problem, operand.is_shared)) {}

  // The example to read for an example of the whole batch.
  __device__ __forceinline__ int64_t Example(const Geometry& geometry, int64_t example) const {
    if (!is_shared) return example;
    const Divider& by_examples = geometry.examples_of_batch;
    return example - by_examples.Quotient(example) * static_cast<int64_t>(by_examples.divisor);
  }
};

// Weights or biases of x's type T or of the type that is computed with.
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

  // kCount values that lie one after another.
  template <int kCount>
  __device__ __forceinline__ void Load(int64_t index, C* values) const {
    if (sizeof(T) != sizeof(C) && is_narrow) {
      const T* narrow = static_cast<const T*>(data) + index;
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = static_cast<C>(narrow[i]);
    } else {
      const C* wide = static_cast<const C*>(data) + index;
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = wide[i];
    }
  }

  // As Load of a multiple of 8 bytes, where the first value is aligned to the largest power of two, up to 16, that
  // divides these bytes.
  template <int kCount>
  __device__ __forceinline__ void LoadVectors(int64_t index, C* values) const {
    if (sizeof(T) != sizeof(C) && is_narrow) {
      LoadVectorsOf<T, kCount>(index, values);
    } else {
      LoadVectorsOf<C, kCount>(index, values);
    }
  }

  // As Load of one value; zero where the operand is absent.
  __device__ __forceinline__ C LoadOptional(int64_t index) const {
    C value = 0;
    if (data != nullptr) Load<1>(index, &value);
    return value;
  }

 private:
  template <typename P, int kCount>
  __device__ __forceinline__ void LoadVectorsOf(int64_t index, C* values) const {
    constexpr int kVec = (kCount * sizeof(P) % 16 == 0 ? 16 : 8) / sizeof(P);
    static_assert(kCount % kVec == 0);
#pragma unroll
    for (int i = 0; i < kCount; i += kVec) {
      P lanes[kVec];
      const Packed<P, kVec> word = LoadPacked<kVec>(static_cast<const P*>(data) + index + i);
      memcpy(lanes, &word, sizeof(word));
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[i + j] = static_cast<C>(lanes[j]);
    }
  }
};

template <typename T>
struct Weights {
  Parameters<T> weight, bias;

  template <int kWidth>
  __device__ __forceinline__ ComputeType<T> Load(const Geometry& geometry, int64_t example, int64_t channel,
                                                 ComputeType<T>* weights) const {
    weight.template Load<kWidth>(weight.Row(geometry, example, channel) * kWidth, weights);
    return bias.LoadOptional(bias.Row(geometry, example, channel));
  }
};

// The inputs before time 0: the newest of the `length` entries in each row of a state, zeros without one.
template <typename T>
struct InitialState {
  Input<T> entries;
  int64_t length = 0;

  // The address after the newest entry of a row, where the entry for time t < 0 is at [t]; nullptr without a state.
  __device__ __forceinline__ const T* End(const Geometry& geometry, int64_t example, int64_t channel) const {
    if (entries.data == nullptr) return nullptr;
    return entries.data + (entries.Example(geometry, example) * geometry.channels + channel + 1) * length;
  }
};

// The taps of kCount times that follow each other, as the bytes of words. Bit 0 is always set; kernels do not look at
// it.
template <int kCount>
struct Taps {
  static constexpr int kWords = (kCount + 3) / 4;
  uint32_t words[kWords];

  // Whether every one of the first `width` bits of all kCount is set.
  __device__ __forceinline__ bool HasAll(int width) const {
    bool has_all = true;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int bytes = kCount - 4 * w < 4 ? kCount - 4 * w : 4;
      const uint32_t bits = (0x01010101u >> (8 * (4 - bytes))) * ((1u << width) - 1);
      has_all = has_all && (words[w] & bits) == bits;
    }
    return has_all;
  }

  __device__ __forceinline__ bool Has(int i, int steps_back) const {
    return (words[i / 4] >> (8 * (i % 4) + steps_back)) & 1u;
  }

  // Those of the input whose taps are at this address, and of the next ones. The row has `before` inputs before it and
  // `after` from it on; what lies outside of the row does not matter, and gets all taps.
  __device__ __forceinline__ void Load(const uint8_t* address, int before, int after) {
    if (before >= 0 && after >= 4 * kWords && reinterpret_cast<uintptr_t>(address) % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint32_t*>(address)[i];
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[w] = ~0u;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
          const int place = 4 * w + i;
          if (place >= -before && place < after) words[w] ^= static_cast<uint32_t>(address[place] ^ 0xffu) << (8 * i);
        }
      }
    }
  }
};

// ---- Arithmetic.

// Keeps compilers from widening a value again wherever it is used.
__device__ __forceinline__ void KeepWide(float& value) { asm("" : "+f"(value)); }
__device__ __forceinline__ void KeepWide(double& value) { asm("" : "+d"(value)); }

__device__ __forceinline__ double Sigmoid(double z) { return 1.0 / (1.0 + exp(-z)); }

// Within a few units in the last place; 0 and 1 at the infinities, where ex2 gives infinity and 0.
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

// dy times the derivative of silu: s (1 + z (1 - s)). With z large, z - z s is 0, not infinity times 0.
template <typename C>
__device__ __forceinline__ C SiluBackward(C z, C dy) {
  const C s = Sigmoid(z), scaled = dy * s;
  return fma(scaled, fma(-z, s, z), scaled);
}

}  // namespace jax_baracuda::causal_conv1d
