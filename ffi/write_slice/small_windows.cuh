// The CUDA kernel of write_slice for small windows, as in decoding, which is latency-bound. A thread has one word, and
// loads it without waiting for the starts. The kernel arguments are compact, because loading them adds latency too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/core/cuda_status.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/write_slice/tuning.h"
#include "ffi/write_slice/write_slice.h"

namespace jax_baracuda::write_slice {

using SmallWord = uint4;

inline constexpr int kSmallThreads = 256;
inline constexpr int kMaxSmallWindows = 2;  // per launch
inline constexpr int kMaxSmallAxes = 3;

// A window whose rows begin and end at multiples of a word. The first kAxes - 1 axes number the rows.
template <int kAxes>
struct SmallWindow {
  char* dest;
  const SmallWord* source;
  uint32_t num_words;
  bool drop, has_batch, source_is_shared;
  ShortDivider source_words, words_of_row, rows_of_batch_element;
  ShortDivider sizes[kAxes];
  Axis axes[kAxes];
};

template <int kAxes, int kWindows>
struct SmallWindows {
  SmallWindow<kAxes> windows[kWindows];
};

// A compiler would move a plain load down to the store of its result, after the loads of the starts.
__device__ __forceinline__ SmallWord LoadNow(const SmallWord* address) {
  SmallWord word;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
}

template <int kAxes, int kWindows>
__global__ void __launch_bounds__(kSmallThreads)
    WriteSmallWindows(const __grid_constant__ SmallWindows<kAxes, kWindows> launch) {
  const SmallWindow<kAxes>& window = launch.windows[kWindows == 1 ? 0 : blockIdx.y];
  const uint32_t number = blockIdx.x * kSmallThreads + threadIdx.x;
  if (number >= window.num_words) return;
  const uint32_t source_number =
      window.source_is_shared ? window.source_words.Remainder(number, window.source_words.Quotient(number)) : number;
  const SmallWord word = LoadNow(window.source + source_number);
  uint32_t row = window.words_of_row.Quotient(number);
  const uint32_t batch = window.has_batch ? window.rows_of_batch_element.Quotient(row) : 0;
  const Axis& run = window.axes[kAxes - 1];
  int64_t at = run.Begin(batch, window.drop) * run.stride +
               static_cast<int64_t>(window.words_of_row.Remainder(number, row) * sizeof(SmallWord));
  bool is_inside = at >= 0 && at < run.dim * run.stride;
#pragma unroll
  for (int i = kAxes - 2; i >= 0; --i) {
    const Axis& axis = window.axes[i];
    const uint32_t outer = i == 0 ? 0 : window.sizes[i].Quotient(row);
    const int64_t index = window.sizes[i].Remainder(row, outer) + axis.Begin(batch, window.drop);
    row = outer;
    is_inside = is_inside && index >= 0 && index < axis.dim;
    at += index * axis.stride;
  }
  if (is_inside) *reinterpret_cast<SmallWord*>(window.dest + at) = word;
}

// Whether this kernel can write the windows.
inline bool AreSmall(const std::vector<Update>& updates) {
  for (const Update& update : updates) {
    const bool has_words = !update.has_bits && update.word == sizeof(SmallWord);
    if (!has_words || update.num_axes > kMaxSmallAxes || update.num_axes != updates[0].num_axes ||
        update.num_rows * update.run_units > Tuning::kMaxSmallWords * static_cast<int64_t>(sizeof(SmallWord))) {
      return false;
    }
  }
  return !updates.empty() && updates.size() <= kMaxSmallWindows;
}

template <int kAxes, int kWindows>
CudaStatus LaunchSmallOf(const std::vector<Update>& updates, cudaStream_t stream) {
  SmallWindows<kAxes, kWindows> launch;
  uint32_t most_words = 0;
  for (int i = 0; i < kWindows; ++i) {
    const Update& update = updates[i];
    SmallWindow<kAxes>& window = launch.windows[i];
    const int64_t words_of_row = update.run_units / static_cast<int64_t>(sizeof(SmallWord));
    window.dest = static_cast<char*>(update.dest);
    window.source = static_cast<const SmallWord*>(update.source);
    window.num_words = static_cast<uint32_t>(update.num_rows * words_of_row);
    window.drop = update.drop;
    window.has_batch = update.has_batch;
    window.source_is_shared = update.source_rows != update.num_rows;
    window.source_words = ShortDivider(update.source_rows * words_of_row);
    window.words_of_row = ShortDivider(words_of_row);
    window.rows_of_batch_element = ShortDivider(update.rows_of_batch_element);
    for (int axis = 0; axis < kAxes; ++axis) {
      window.axes[axis] = update.axes[axis];
      window.sizes[axis] = ShortDivider(update.axes[axis].size);
    }
    most_words = std::max(most_words, window.num_words);
  }
  const dim3 blocks(GridSize(CeilDivide(most_words, kSmallThreads)), kWindows);
  WriteSmallWindows<kAxes, kWindows><<<blocks, kSmallThreads, 0, stream>>>(launch);
  return JB_LAUNCH_STATUS(WriteSmallWindows);
}

template <int kAxes>
CudaStatus LaunchSmallOf(const std::vector<Update>& updates, cudaStream_t stream) {
  return updates.size() == 1 ? LaunchSmallOf<kAxes, 1>(updates, stream) : LaunchSmallOf<kAxes, 2>(updates, stream);
}

}  // namespace jax_baracuda::write_slice
