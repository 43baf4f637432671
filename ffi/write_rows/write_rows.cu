// The CUDA kernel of write_rows. One launch writes the rows of all pools.
//
// A block writes a tile: some consecutive rows, or a part of one long row. It must not write a row if a later row has
// the same slot. To find out, it puts the slots of its own rows into a small hash table, and looks up those of all later
// rows. Meanwhile the numbers of its rows are on their way, because these loads do not depend on slots.

#include <algorithm>
#include <cstdint>
#include <cuda/atomic>

#include "ffi/core/device_attributes.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/launch_bounds.cuh"
#include "ffi/core/vectors.cuh"
#include "ffi/write_rows/write_rows.cuh"

namespace jax_baracuda::write_rows {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kSlotsPerThread = 8;           // loaded at once
inline constexpr int kMaxRowsOfTile = 32;           // a bit for each in a bucket of the hash table
inline constexpr int kBlocksPerMultiprocessor = 3;  // minimum resident blocks, which caps the registers
inline constexpr int kBucketBits = 10;
inline constexpr int kConvertedLanes = 8;  // numbers of a word that is converted, if vectors fit

// All devices support kernel arguments of 4096 bytes.
inline constexpr int kMaxPools = 8;

// How blocks share the rows of a pool. Words are copied as they are, or consist of numbers that are converted.
struct Tiling {
  int word;  // bytes if copied, numbers if converted
  int rows_of_tile;
  int64_t words_of_row, num_tiles;  // num_tiles: of the whole batch
  uint32_t tiles_of_row, tiles_of_batch_element;
  ShortDivider words_of_tile;  // of one row
  Divider words_of_inner, words_of_scale;
};

struct LaunchArguments {
  const int32_t *slot_of_row, *layer;
  bool slot_of_row_is_shared, layer_is_shared, has_unique_slots;
  int64_t layers, slots, rows;
  Pool pools[kMaxPools];  // blockIdx.y is the number of a pool
  Tiling tilings[kMaxPools];
};
static_assert(sizeof(LaunchArguments) <= 4096);

// What a block knows about the rows of its tile.
struct TileRows {
  uint32_t rows_of_bucket[1 << kBucketBits];  // a bit for each row whose slot has this hash
  int32_t slots[kMaxRowsOfTile];              // -1: out of range
  uint32_t overwritten;                       // a bit for each row whose slot a later row has, too
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
    if (may_repeat && own[0] >= 0) atomicOr(&tile->rows_of_bucket[BucketOf(own[0])], 1u << thread);
  }
  __syncthreads();
  if (!may_repeat) return;

  // `position`: of a row that has this slot, counted from the first row of the tile. Rows that are known to be
  // overwritten are not looked at again, because many rows may have the same slot.
  const cuda::atomic_ref<uint32_t, cuda::thread_scope_block> overwritten(tile->overwritten);
  const auto look_up = [&](int32_t slot, int64_t position) {
    if (slot < 0) return;
    uint32_t rows = tile->rows_of_bucket[BucketOf(slot)], found = 0;
    if (rows != 0) rows &= ~overwritten.load(cuda::memory_order_relaxed);
    for (; rows != 0; rows &= rows - 1) {
      const int row = __ffs(static_cast<int>(rows)) - 1;
      if (row < position && tile->slots[row] == slot) found |= 1u << row;
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

// ---- Words.

// float8 values of a pair of numbers, the first in the lower byte. The instruction returns the largest finite value for
// numbers that overflow; the next code is that of NaN or, if the type has it, infinity.
template <typename To>
__device__ __forceinline__ uint16_t Float8Pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (std::is_same_v<To, Float8E4M3>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
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
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const uint16_t pair = Float8Pair<To>(numbers[i], numbers[i + 1]);
        bytes.lane[i] = static_cast<uint8_t>(pair & 0xffu);
        bytes.lane[i + 1] = static_cast<uint8_t>(pair >> 8);
      }
    }
    StoreVector<uint8_t, kCount>(reinterpret_cast<uint8_t*>(to), bytes);
  }
}

// The words that a thread loads and stores, copied as they are.
template <typename T>
struct CopiedWords {
  static constexpr int kCount = 4;

  T words[kCount];

  // at(i): the position of word i, or -1.
  template <typename At>
  __device__ __forceinline__ void Load(const Pool& pool, const At& at) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t from = at(i);
      if (from >= 0) words[i] = static_cast<const T*>(pool.rows)[from];
    }
  }

  __device__ __forceinline__ void Store(const Pool& pool, const float* /*scale*/, int i, int64_t to) const {
    static_cast<T*>(pool.dest)[to] = words[i];
  }
};

// Words of kLanes numbers, which are scaled and converted.
template <int kLanes>
struct ConvertedWords {
  static constexpr int kCount = 2;

  float numbers[kCount][kLanes];

  template <typename At>
  __device__ __forceinline__ void Load(const Pool& pool, const At& at) {
    DispatchRows(pool.from, [&](auto tag) {
      using From = Vector<typename decltype(tag)::type, kLanes>;
      From words[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int64_t from = at(i);
        if (from >= 0) words[i] = static_cast<const From*>(pool.rows)[from];
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) WidenLanes<typename decltype(tag)::type, kLanes>(&words[i], numbers[i]);
    });
  }

  // `scale`: nullptr for 1.
  __device__ __forceinline__ void Store(const Pool& pool, const float* scale, int i, int64_t to) const {
    float scaled[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) scaled[lane] = numbers[i][lane];
    if (scale != nullptr) {
      const float divisor = *scale;
#pragma unroll
      for (float& number : scaled) number = __fdiv_rn(number, divisor);
    }
    DispatchPool(pool.to, [&](auto tag) {
      using To = typename decltype(tag)::type;
      StoreNumbers<To, kLanes>(scaled, static_cast<To*>(pool.dest) + to * kLanes);
    });
  }
};

// ---- Tiles.

template <typename Words>
__device__ __forceinline__ void WriteTile(const LaunchArguments& launch, const Pool& pool, const Tiling& tiling,
                                          TileRows* tile_rows) {
  const uint32_t batch = blockIdx.x / tiling.tiles_of_batch_element;
  const uint32_t tile = blockIdx.x - batch * tiling.tiles_of_batch_element, group = tile / tiling.tiles_of_row;
  const int64_t first_row = int64_t{group} * tiling.rows_of_tile;
  const int64_t first_word = int64_t{tile - group * tiling.tiles_of_row} * tiling.words_of_tile.divisor;
  const int num_rows = static_cast<int>(min(int64_t{tiling.rows_of_tile}, launch.rows - first_row));
  const uint32_t num_words = static_cast<uint32_t>(num_rows) * tiling.words_of_tile.divisor;

  const Slots slots{launch.slot_of_row + (launch.slot_of_row_is_shared ? 0 : batch * launch.rows), launch.rows,
                    launch.slots};
  int32_t own_slots[kSlotsPerThread];
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) {
    own_slots[i] = slots.Load(first_row + static_cast<int>(threadIdx.x) + i * kThreads);
  }
  const int64_t layer = launch.layer == nullptr ? 0 : launch.layer[launch.layer_is_shared ? 0 : batch];
  const int64_t first_source = ((pool.rows_are_shared ? 0 : batch * launch.rows) + first_row) * tiling.words_of_row;

  uint32_t overwritten = 0;
#pragma unroll 1
  for (uint32_t begin = threadIdx.x; begin < RoundUp(num_words, kThreads); begin += Words::kCount * kThreads) {
    Words words;
    words.Load(pool, [&](int i) -> int64_t {
      const uint32_t number = begin + i * kThreads, row = tiling.words_of_tile.Quotient(number);
      const int64_t word = first_word + tiling.words_of_tile.Remainder(number, row);
      if (number >= num_words || word >= tiling.words_of_row) return -1;
      return first_source + row * tiling.words_of_row + word;
    });
    if (begin == threadIdx.x) {
      FindRows(slots, own_slots, first_row, num_rows, launch.has_unique_slots, tile_rows);
      overwritten = tile_rows->overwritten;
      if (layer < 0 || layer >= launch.layers) return;
    }
#pragma unroll
    for (int i = 0; i < Words::kCount; ++i) {
      const uint32_t number = begin + i * kThreads, row = tiling.words_of_tile.Quotient(number);
      const int64_t word = first_word + tiling.words_of_tile.Remainder(number, row);
      if (number >= num_words || word >= tiling.words_of_row) continue;
      const int64_t slot = tile_rows->slots[row];
      if (slot < 0 || (overwritten >> row & 1u) != 0) continue;
      const int64_t words_of_inner = static_cast<int64_t>(tiling.words_of_inner.divisor);
      const int64_t outer = pool.outer == 1 ? 0 : tiling.words_of_inner.Quotient(word);
      const int64_t run = ((batch * launch.layers + layer) * pool.outer + outer) * launch.slots + slot;
      const float* scale = pool.scales;
      if (scale != nullptr) {
        scale += (pool.scales_are_shared ? 0 : batch * pool.num_scales) + tiling.words_of_scale.Quotient(word);
      }
      words.Store(pool, scale, i, run * words_of_inner + word - outer * words_of_inner);
    }
  }
}

__global__ void __launch_bounds__(kThreads, MinBlocks(kThreads, kBlocksPerMultiprocessor))
    WriteRows(const __grid_constant__ LaunchArguments launch) {
  __shared__ TileRows tile_rows;
  const Pool& pool = launch.pools[blockIdx.y];
  const Tiling& tiling = launch.tilings[blockIdx.y];
  if (int64_t{blockIdx.x} >= tiling.num_tiles) return;
  if (pool.converts) {
    if (tiling.word == 1) return WriteTile<ConvertedWords<1>>(launch, pool, tiling, &tile_rows);
    return WriteTile<ConvertedWords<kConvertedLanes>>(launch, pool, tiling, &tile_rows);
  }
  switch (tiling.word) {
    case 1:
      return WriteTile<CopiedWords<uint8_t>>(launch, pool, tiling, &tile_rows);
    case 2:
      return WriteTile<CopiedWords<uint16_t>>(launch, pool, tiling, &tile_rows);
    case 4:
      return WriteTile<CopiedWords<uint32_t>>(launch, pool, tiling, &tile_rows);
    case 8:
      return WriteTile<CopiedWords<uint2>>(launch, pool, tiling, &tile_rows);
    default:
      return WriteTile<CopiedWords<uint4>>(launch, pool, tiling, &tile_rows);
  }
}

// ---- The launch.

// The widest word at whose multiples all rows and runs begin and end, in the rows and in the pool.
int WordOf(const Pool& pool) {
  if (pool.converts) {
    const bool fits = pool.inner % kConvertedLanes == 0 &&
                      pool.row_elements() / pool.num_scales % kConvertedLanes == 0 &&
                      AreAligned(VectorAlignment(kConvertedLanes * pool.row_bytes_of_element), pool.rows) &&
                      AreAligned(VectorAlignment(kConvertedLanes * pool.pool_bytes_of_element), pool.dest);
    return fits ? kConvertedLanes : 1;
  }
  const uint64_t alignment = static_cast<uint64_t>(pool.inner * pool.pool_bytes_of_element) |
                             reinterpret_cast<uintptr_t>(pool.dest) | reinterpret_cast<uintptr_t>(pool.rows) |
                             kVectorBytes;
  return static_cast<int>(alignment & (~alignment + 1));
}

Tiling TilingOf(const Call& call, const Pool& pool, int64_t most_rows_of_tile) {
  constexpr int64_t kMaxWordsOfTile = 4 * kThreads;
  Tiling tiling{};
  tiling.word = WordOf(pool);
  const int64_t units = pool.converts ? 1 : pool.pool_bytes_of_element;  // of which words consist, in an element
  tiling.words_of_inner = Divider(pool.inner * units / tiling.word);
  tiling.words_of_row = pool.row_elements() * units / tiling.word;
  tiling.words_of_scale = Divider(tiling.words_of_row / pool.num_scales);
  const int64_t words_of_tile = std::min(tiling.words_of_row, kMaxWordsOfTile);
  tiling.words_of_tile = ShortDivider(static_cast<uint64_t>(words_of_tile));
  const int64_t tiles_of_row = CeilDivide(tiling.words_of_row, words_of_tile);
  // A tile has at least a word for each thread, or else threads would be idle.
  const int64_t rows = tiles_of_row > 1 ? 1 : std::max(CeilDivide(kThreads, words_of_tile), most_rows_of_tile);
  tiling.rows_of_tile = static_cast<int>(std::min<int64_t>({rows, call.rows, kMaxRowsOfTile}));
  const int64_t tiles_of_batch_element = CeilDivide(call.rows, tiling.rows_of_tile) * tiles_of_row;
  tiling.tiles_of_row = static_cast<uint32_t>(tiles_of_row);  // CUDA rejects grids that do not fit
  tiling.tiles_of_batch_element = static_cast<uint32_t>(tiles_of_batch_element);
  tiling.num_tiles = call.batch * tiles_of_batch_element;
  return tiling;
}

}  // namespace

CudaStatus Launch(const Call& call, cudaStream_t stream) {
  for (const Copy& copy : call.copies) {
    const size_t bytes = static_cast<size_t>(copy.bytes);
    JB_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(copy.to, copy.from, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  if (call.pools.empty()) return {};
  int multiprocessors = 0;
  JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
  const int count = static_cast<int>(call.pools.size());
  // As many tiles as fit on the GPU at once. More rows in a tile save lookups.
  const int64_t rows_of_tile =
      CeilDivide(MultiplySizes(call.batch, call.rows) * count, kBlocksPerMultiprocessor * int64_t{multiprocessors});
  for (int first = 0; first < count; first += kMaxPools) {
    const int pools_of_launch = std::min(count - first, kMaxPools);
    LaunchArguments launch{};
    launch.slot_of_row = call.slot_of_row;
    launch.layer = call.layer;
    launch.slot_of_row_is_shared = call.slot_of_row_is_shared;
    launch.layer_is_shared = call.layer_is_shared;
    launch.has_unique_slots = call.has_unique_slots;
    launch.layers = call.layers;
    launch.slots = call.slots;
    launch.rows = call.rows;
    int64_t most_tiles = 0;
    for (int i = 0; i < pools_of_launch; ++i) {
      launch.pools[i] = call.pools[first + i];
      launch.tilings[i] = TilingOf(call, launch.pools[i], rows_of_tile);
      most_tiles = std::max(most_tiles, launch.tilings[i].num_tiles);
    }
    WriteRows<<<dim3(GridSize(most_tiles), pools_of_launch), kThreads, 0, stream>>>(launch);
    JB_RETURN_IF_LAUNCH_ERROR(WriteRows);
  }
  return {};
}

}  // namespace jax_baracuda::write_rows
