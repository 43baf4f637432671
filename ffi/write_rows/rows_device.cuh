// Shared by the CUDA kernels that write rows to slots: which rows of a block's tile are written, and the conversion of
// their numbers.
//
// A block must not write a row if a later row has the same slot. To find out, it puts the slots of its own rows into a
// small hash table, and looks up those of all later rows.
#pragma once

#include <cstdint>
#include <cuda/atomic>
#include <type_traits>

#include "ffi/core/vectors.cuh"
#include "ffi/write_rows/write_rows.h"

namespace jax_baracuda::write_rows {

inline constexpr int kThreads = 256;
inline constexpr int kSlotsPerThread = 8;  // loaded at once
inline constexpr int kBucketBits = 10;

using RowBits = unsigned long long;  // a bit for each row of a tile; the type of CUDA's atomic functions
inline constexpr int kMaxRowsOfTile = 64;

// What a block knows about the rows of its tile.
struct TileRows {
  RowBits rows_of_bucket[1 << kBucketBits];  // the rows whose slots have this hash
  RowBits overwritten;                       // the rows whose slot a later row has, too
  int32_t slots[kMaxRowsOfTile];             // -1: out of range
};

__device__ __forceinline__ uint32_t BucketOf(int32_t slot) {
  return static_cast<uint32_t>(slot) * 2654435769u >> (32 - kBucketBits);
}

// The slots of rows, -1 if out of range, and of positions beyond the last row.
struct Slots {
  const int32_t* of_row;
  int64_t rows, slots;

  __device__ __forceinline__ int32_t Load(int64_t row) const {
    const int32_t slot = row < rows ? of_row[row] : -1;
    return slot < slots ? slot : -1;
  }
};

// Finds the rows of the tile to write. `own`: the slots of rows first_row + threadIdx.x + i * kThreads.
__device__ __forceinline__ void FindRows(const Slots& slots, const int32_t (&own)[kSlotsPerThread], int64_t first_row,
                                         int num_rows, bool has_unique_slots, TileRows* tile) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t later_rows = slots.rows - first_row;
  const bool may_repeat = !has_unique_slots && later_rows > 1;
  if (may_repeat) {
    for (int i = thread; i < 1 << kBucketBits; i += kThreads) tile->rows_of_bucket[i] = 0;
    __syncthreads();
  }
  if (thread == 0) tile->overwritten = 0;
  if (thread < num_rows) {
    tile->slots[thread] = own[0];
    if (may_repeat && own[0] >= 0) atomicOr(&tile->rows_of_bucket[BucketOf(own[0])], RowBits{1} << thread);
  }
  __syncthreads();
  if (!may_repeat) return;

  // `position`: of a row that has this slot, counted from the first row of the tile. Rows that are known to be
  // overwritten are not looked at again, because many rows may have the same slot.
  const cuda::atomic_ref<RowBits, cuda::thread_scope_block> overwritten(tile->overwritten);
  const auto look_up = [&](int32_t slot, int64_t position) {
    if (slot < 0) return;
    RowBits rows = tile->rows_of_bucket[BucketOf(slot)], found = 0;
    if (rows != 0) rows &= ~overwritten.load(cuda::memory_order_relaxed);
    for (; rows != 0; rows &= rows - 1) {
      const int row = __ffsll(static_cast<long long>(rows)) - 1;
      if (row < position && tile->slots[row] == slot) found |= RowBits{1} << row;
    }
    if (found != 0) overwritten.fetch_or(found, cuda::memory_order_relaxed);
  };
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) look_up(own[i], thread + i * kThreads);
  for (int64_t begin = kSlotsPerThread * kThreads; begin < later_rows; begin += kSlotsPerThread * kThreads) {
    int32_t more[kSlotsPerThread];
#pragma unroll
    for (int i = 0; i < kSlotsPerThread; ++i) more[i] = slots.Load(first_row + begin + thread + i * kThreads);
#pragma unroll
    for (int i = 0; i < kSlotsPerThread; ++i) look_up(more[i], begin + thread + i * kThreads);
  }
  __syncthreads();
}

// float8 values of a pair of numbers, the first in the lower byte. The instruction returns the largest finite value for
// numbers that overflow; the next code is that of NaN or, if the type has it, infinity. `may_overflow`: false if no
// number overflows.
template <typename To>
__device__ __forceinline__ uint16_t Float8Pair(float first, float second, bool may_overflow) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (std::is_same_v<To, Float8E4M3>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  if (!may_overflow) return pair;
  const auto overflows = [](float number) {
    const uint32_t magnitude = __float_as_uint(number) & 0x7fffffffu;
    return To::Overflows(magnitude) && magnitude <= 0x7f800000u;  // NaN is NaN already
  };
  return static_cast<uint16_t>(pair + (overflows(first) ? 0x0001 : 0) + (overflows(second) ? 0x0100 : 0));
#else
  return static_cast<uint16_t>(To::Of(first).bits | To::Of(second).bits << 8);
#endif
}

template <typename To, int kCount>
__device__ __forceinline__ void StoreNumbers(const float* numbers, To* to) {
  if constexpr (std::is_same_v<To, float>) {
    Vector<float, kCount> vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.lane[i] = numbers[i];
    StoreVector<float, kCount>(to, vector);
  } else if constexpr (sizeof(To) == 2) {
    StoreNarrow<To, kCount>(to, numbers);
  } else {
    Vector<uint8_t, kCount> bytes;
    if constexpr (std::is_same_v<To, Int8> || kCount == 1) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) bytes.lane[i] = BitCast<uint8_t>(To::Of(numbers[i]));
    } else {
      float largest = 0;  // NaN does not count
#pragma unroll
      for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(numbers[i]));
      const bool may_overflow = To::Overflows(__float_as_uint(largest));
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const uint16_t pair = Float8Pair<To>(numbers[i], numbers[i + 1], may_overflow);
        bytes.lane[i] = static_cast<uint8_t>(pair & 0xffu);
        bytes.lane[i + 1] = static_cast<uint8_t>(pair >> 8);
      }
    }
    StoreVector<uint8_t, kCount>(reinterpret_cast<uint8_t*>(to), bytes);
  }
}

}  // namespace jax_baracuda::write_rows
