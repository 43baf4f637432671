// Shared by the CUDA kernels that write rows to slots: which rows of a block's tile are written, and the conversion of
// their numbers.
//
// A block must not write a row if a later row has the same slot. To find out, it compares the slots of all later rows
// with those of its own rows. If these are many, it looks them up in a small hash table.
#pragma once

#include <cstdint>
#include <cuda/atomic>
#include <type_traits>

#include "ffi/core/vectors.cuh"
#include "ffi/core/warp.cuh"
#include "ffi/write_rows/write_rows.h"

namespace jax_baracuda::write_rows {

inline constexpr int kThreads = 256;
inline constexpr int kSlotsPerThread = 8;  // loaded at once
inline constexpr int kFewRows = 4;         // of a tile without a hash table
inline constexpr int kBucketBits = 10, kFilterBits = 15;

using RowBits = unsigned long long;  // a bit for each row of a tile; the type of CUDA's atomic functions
inline constexpr int kMaxRowsOfTile = 64;

// What a block knows about the rows of its tile.
struct TileRows {
  alignas(kVectorBytes) uint32_t filter[1 << (kFilterBits - 5)];   // a bit for each longer hash that a slot has
  alignas(kVectorBytes) RowBits rows_of_bucket[1 << kBucketBits];  // the rows whose slots have this hash
  RowBits overwritten;                                             // the rows whose slot a later row has, too
  alignas(kVectorBytes) uint32_t overwritten_by_warp[kThreads / kWarpThreads];  // the same, as each warp finds them
  int32_t slots[kMaxRowsOfTile];                                                // -1: out of range
};

__device__ __forceinline__ uint32_t HashOf(int32_t slot, int bits) {
  return static_cast<uint32_t>(slot) * 2654435769u >> (32 - bits);
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

// Finds the rows of a block's tile to write. Slots that it loads first are on their way while the block does other work.
class RowsToWrite {
 public:
  __device__ __forceinline__ RowsToWrite(const Slots& slots, int64_t first_row, int num_rows, bool has_unique_slots)
      : slots_(slots),
        first_row_(first_row),
        later_rows_(slots.rows - first_row),
        num_rows_(num_rows),
        may_repeat_(!has_unique_slots && later_rows_ > 1) {
    LoadLater(0, later_);
    if (may_repeat_ && num_rows <= kFewRows) {
#pragma unroll
      for (int row = 0; row < kFewRows; ++row) few_[row] = slots.Load(first_row + row);
    }
  }

  // Returns the rows whose slot a later row has, too, and sets the slots of all rows. Synchronises the block.
  __device__ __forceinline__ RowBits FindOverwritten(TileRows* tile) {
    const int thread = static_cast<int>(threadIdx.x);
    if (!may_repeat_ || num_rows_ <= kFewRows) {
      if (thread < num_rows_) tile->slots[thread] = later_[0];
      if (may_repeat_) return CompareFew(tile);
      __syncthreads();
      return 0;
    }
    for (int i = thread; i < kFilterWords; i += kThreads) reinterpret_cast<uint4*>(tile->filter)[i] = uint4{};
    for (int i = thread; i < kBucketWords; i += kThreads) reinterpret_cast<uint4*>(tile->rows_of_bucket)[i] = uint4{};
    if (thread == 0) tile->overwritten = 0;
    __syncthreads();
    if (thread < num_rows_) {
      const int32_t slot = later_[0];
      tile->slots[thread] = slot;
      if (slot >= 0) {
        const uint32_t hash = HashOf(slot, kFilterBits);
        atomicOr(&tile->filter[hash / 32], 1u << hash % 32);
        atomicOr(&tile->rows_of_bucket[HashOf(slot, kBucketBits)], RowBits{1} << thread);
      }
    }
    __syncthreads();
    ForEachLater([&](int32_t slot, int64_t position) { LookUp(slot, position, tile); });
    __syncthreads();
    return tile->overwritten;
  }

 private:
  static constexpr int kFilterWords = sizeof(TileRows::filter) / sizeof(uint4);
  static constexpr int kBucketWords = sizeof(TileRows::rows_of_bucket) / sizeof(uint4);

  // Loads the slots of rows first_row + begin + threadIdx.x + i * kThreads.
  __device__ __forceinline__ void LoadLater(int64_t begin, int32_t (&later)[kSlotsPerThread]) const {
#pragma unroll
    for (int i = 0; i < kSlotsPerThread; ++i) {
      later[i] = -1;
      if (begin + i * kThreads >= later_rows_) continue;  // few rows should cost few instructions
      later[i] = slots_.Load(first_row_ + begin + i * kThreads + static_cast<int>(threadIdx.x));
    }
  }

  // Calls look_at(slot, position) for the rows that follow the first one of the tile, at `position` from it.
  template <typename LookAt>
  __device__ __forceinline__ void ForEachLater(const LookAt& look_at) {
    constexpr int64_t kAtOnce = kSlotsPerThread * kThreads;
    for (int64_t begin = 0; begin < later_rows_; begin += kAtOnce) {
      int32_t next[kSlotsPerThread] = {};
      if (begin + kAtOnce < later_rows_) LoadLater(begin + kAtOnce, next);
#pragma unroll
      for (int i = 0; i < kSlotsPerThread; ++i) {
        if (begin + i * kThreads >= later_rows_) break;
        look_at(later_[i], begin + static_cast<int>(threadIdx.x) + i * kThreads);
      }
#pragma unroll
      for (int i = 0; i < kSlotsPerThread; ++i) later_[i] = next[i];
    }
  }

  __device__ __forceinline__ RowBits CompareFew(TileRows* tile) {
    uint32_t found = 0;
    ForEachLater([&](int32_t slot, int64_t position) {
#pragma unroll
      for (int row = 0; row < kFewRows; ++row) {
        if (slot == few_[row] && row < position) found |= 1u << row;
      }
    });
    found = __reduce_or_sync(kFullWarp, found);
    if (threadIdx.x % kWarpThreads == 0) tile->overwritten_by_warp[threadIdx.x / kWarpThreads] = found;
    __syncthreads();
    uint32_t overwritten = 0;
#pragma unroll
    for (const uint32_t of_warp : tile->overwritten_by_warp) overwritten |= of_warp;
    return overwritten;
  }

  // Rows that are known to be overwritten are not looked at again, because many rows may have the same slot.
  __device__ __forceinline__ void LookUp(int32_t slot, int64_t position, TileRows* tile) const {
    const uint32_t hash = HashOf(slot, kFilterBits);
    if (slot < 0 || (tile->filter[hash / 32] >> hash % 32 & 1u) == 0) return;
    const cuda::atomic_ref<RowBits, cuda::thread_scope_block> overwritten(tile->overwritten);
    RowBits rows = tile->rows_of_bucket[HashOf(slot, kBucketBits)] & ~overwritten.load(cuda::memory_order_relaxed);
    RowBits found = 0;
    for (; rows != 0; rows &= rows - 1) {
      const int row = __ffsll(static_cast<long long>(rows)) - 1;
      if (row < position && tile->slots[row] == slot) found |= RowBits{1} << row;
    }
    if (found != 0) overwritten.fetch_or(found, cuda::memory_order_relaxed);
  }

  Slots slots_;
  int64_t first_row_, later_rows_;
  int num_rows_;
  bool may_repeat_;
  int32_t later_[kSlotsPerThread];  // of the next rows to look at
  int32_t few_[kFewRows];           // of the rows of a tile with few
};

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
