// Pools of states, and the sequences of a flat array of times, as kernels see them.
#pragma once

#include <cstdint>

#include "ffi/causal_conv1d/conv_device.cuh"

namespace jax_baracuda::causal_conv1d {

template <typename T>
struct Pool {
  T* states;
  int64_t slots, length, sequences;
  BatchArray<int32_t> slots_of_sequences;

  explicit Pool(const StatePool& pool)
      : states(static_cast<T*>(pool.data)),
        slots(pool.slots),
        length(pool.length),
        sequences(pool.sequences),
        slots_of_sequences(pool.slots_of_sequences, pool.sequences) {}

  __device__ __forceinline__ bool Has(int64_t slot) const { return slot >= 0 && slot < slots; }

  __device__ __forceinline__ T* Row(const Geometry& geometry, int64_t batch, int64_t slot, int64_t channel) const {
    return states + ((batch * slots + slot) * geometry.channels + channel) * length;
  }
};

// The sequences of a ragged call, and the states with which they begin.
template <typename T>
struct RaggedArguments : ForwardArguments<T> {
  Pool<T> pool;
  BatchArray<int32_t> starts;
  BatchArray<uint8_t> has_state;

  explicit RaggedArguments(const RaggedCall& call)
      : ForwardArguments<T>(call),
        pool(call.pool),
        starts(call.starts, call.pool.sequences + 1),
        has_state(call.has_state, call.pool.sequences) {}
};

// The sequence of a time. For any starts, begin <= time < end.
struct SequenceAt {
  int32_t index;  // -1 before the first sequence, the number of sequences after the last one
  int32_t begin, end;

  __device__ __forceinline__ SequenceAt(const int32_t* starts, int32_t sequences, int32_t time)
      : index(-1), begin(0), end(0x7fffffff) {
    int32_t after = sequences + 1;
    while (after - index > 1) {
      const int32_t middle = index + (after - index) / 2, start = starts[middle];
      if (start <= time) {
        index = middle;
        begin = max(start, 0);
      } else {
        after = middle;
        end = start;
      }
    }
  }
};

}  // namespace jax_baracuda::causal_conv1d
