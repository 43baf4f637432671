// The CUDA kernel of write_rows. One launch writes the rows of neighbouring pools that have the same kind of words.
//
// A block writes a tile: some consecutive rows, or a part of one long row. While it finds out which of its rows to
// write, their numbers are on their way, because these loads do not depend on slots.

#include <algorithm>
#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/core/device_attributes.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/launch_bounds.cuh"
#include "ffi/core/vectors.cuh"
#include "ffi/write_rows/rows_device.cuh"

namespace jax_baracuda::write_rows {
namespace {

inline constexpr int kBlocksPerMultiprocessor = 3;  // minimum resident blocks, which caps the registers
inline constexpr int kConvertedLanes = 8;           // numbers of a word that is converted, if vectors fit

// All devices support kernel arguments of 4096 bytes.
inline constexpr int kMaxPools = 8;

// How blocks share the rows of a pool. Words are copied as they are, or consist of numbers that are converted.
struct Tiling {
  int rows_of_tile;
  int64_t words_of_row, num_tiles;  // num_tiles: of the whole batch
  uint32_t tiles_of_row, tiles_of_batch_element;
  ShortDivider words_of_tile_row;  // the part of a row that is in a tile
  Divider words_of_inner, words_of_scale;
};

// What all pools share.
struct Rows {
  const int32_t *slot_of_row, *layer;
  bool slot_of_row_is_shared, layer_is_shared, has_unique_slots;
  int64_t layers, slots, rows;
};

// Few pools have a kernel of their own, because loading arguments adds latency.
template <int kPools>
struct LaunchArguments {
  Rows rows;
  Pool pools[kPools];  // blockIdx.y is the number of a pool
  Tiling tilings[kPools];
};
static_assert(sizeof(LaunchArguments<kMaxPools>) <= 4096);

// ---- Words.

// Words of T, copied as they are.
template <typename T>
struct CopiedWord {
  static constexpr int kAtOnce = 4;  // per thread
  using Raw = T;

  static __device__ __forceinline__ void Store(const Pool& pool, const float* /*scale*/, const Raw& raw, int64_t to) {
    static_cast<T*>(pool.dest)[to] = raw;
  }
};

// Words of kLanes numbers of kBytes each, which are scaled and converted. They stay as they are until they are stored,
// so that nothing waits for their loads before.
template <int kLanes, int kBytes>
struct ConvertedWord {
  static constexpr int kAtOnce = kBytes == 4 ? 2 : 4;  // as many as registers hold
  using Raw = Vector<std::conditional_t<kBytes == 4, uint32_t, uint16_t>, kLanes>;

  // `scale`: nullptr for 1.
  static __device__ __forceinline__ void Store(const Pool& pool, const float* scale, const Raw& raw, int64_t to) {
    float numbers[kLanes] = {};
    DispatchRows(pool.from, [&](auto tag) {
      using From = typename decltype(tag)::type;
      if constexpr (sizeof(From) == kBytes) WidenLanes<From, kLanes>(&raw, numbers);
    });
    if (scale != nullptr) {
      const float divisor = *scale;
#pragma unroll
      for (float& number : numbers) number = __fdiv_rn(number, divisor);
    }
    DispatchPool(pool.to, [&](auto tag) {
      using To = typename decltype(tag)::type;
      StoreNumbers<To, kLanes>(numbers, static_cast<To*>(pool.dest) + to * kLanes);
    });
  }
};

// ---- Tiles.

template <typename Word, int kPools>
__global__ void __launch_bounds__(kThreads, MinBlocks(kThreads, kBlocksPerMultiprocessor))
    WriteRows(const __grid_constant__ LaunchArguments<kPools> launch) {
  using Raw = typename Word::Raw;
  constexpr int kAtOnce = Word::kAtOnce;
  __shared__ TileRows tile_rows;
  const Rows& rows = launch.rows;
  const Pool& pool = launch.pools[blockIdx.y];
  const Tiling& tiling = launch.tilings[blockIdx.y];
  if (int64_t{blockIdx.x} >= tiling.num_tiles) return;
  const uint32_t batch = blockIdx.x / tiling.tiles_of_batch_element;
  const uint32_t tile = blockIdx.x - batch * tiling.tiles_of_batch_element, group = tile / tiling.tiles_of_row;
  const int64_t first_row = int64_t{group} * tiling.rows_of_tile;
  const int64_t first_word = int64_t{tile - group * tiling.tiles_of_row} * tiling.words_of_tile_row.divisor;
  const int num_rows = static_cast<int>(min(int64_t{tiling.rows_of_tile}, rows.rows - first_row));
  // A tile with several rows has whole rows, so its words are neighbours.
  const int num_words = static_cast<int>(
      min(int64_t{num_rows} * tiling.words_of_tile_row.divisor, int64_t{num_rows} * tiling.words_of_row - first_word));
  const Raw* const source = static_cast<const Raw*>(pool.rows) +
                            ((pool.rows_are_shared ? 0 : batch * rows.rows) + first_row) * tiling.words_of_row +
                            first_word;
  const auto load = [&](int begin, Raw(&words)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i * kThreads < num_words) words[i] = source[begin + i * kThreads];
    }
  };

  RowsToWrite rows_to_write(
      {rows.slot_of_row + (rows.slot_of_row_is_shared ? 0 : batch * rows.rows), rows.rows, rows.slots}, first_row,
      num_rows, rows.has_unique_slots);
  const int64_t layer = rows.layer == nullptr ? 0 : rows.layer[rows.layer_is_shared ? 0 : batch];
  Raw words[kAtOnce];
  load(static_cast<int>(threadIdx.x), words);
  const RowBits overwritten = rows_to_write.FindOverwritten(&tile_rows);
  if (layer < 0 || layer >= rows.layers) return;

  const int64_t words_of_inner = static_cast<int64_t>(tiling.words_of_inner.divisor);
  const int64_t first_dest = (batch * rows.layers + layer) * rows.slots * tiling.words_of_row;
  const float* scales = pool.scales;
  if (scales != nullptr && !pool.scales_are_shared) scales += batch * pool.num_scales;
#pragma unroll 1
  for (int begin = static_cast<int>(threadIdx.x); begin < num_words; begin += kAtOnce * kThreads) {
    Raw next[kAtOnce];
    load(begin + kAtOnce * kThreads, next);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t number = static_cast<uint32_t>(begin + i * kThreads);
      const uint32_t row = tiling.words_of_tile_row.Quotient(number);
      if (static_cast<int>(number) >= num_words) continue;
      const int64_t slot = tile_rows.slots[row];
      if (slot < 0 || (overwritten >> row & 1u) != 0) continue;
      const int64_t word = first_word + tiling.words_of_tile_row.Remainder(number, row);
      const int64_t outer = pool.outer == 1 ? 0 : tiling.words_of_inner.Quotient(word);
      const float* const scale = scales == nullptr ? nullptr : scales + tiling.words_of_scale.Quotient(word);
      const int64_t run = outer * (rows.slots - 1) + slot;
      Word::Store(pool, scale, words[i], first_dest + run * words_of_inner + word);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) words[i] = next[i];
  }
}

// ---- The launch.

// The widest word at whose multiples all rows and runs begin and end, in the rows and in the pool: in bytes if it is
// copied, in numbers if they are converted.
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

// Whether a launch serves both pools.
bool HaveSameWords(const Pool& a, const Pool& b) {
  return WordOf(a) == WordOf(b) && a.converts == b.converts &&
         (!a.converts || a.row_bytes_of_element == b.row_bytes_of_element);
}

Tiling TilingOf(const Call& call, const Pool& pool, int64_t most_rows_of_tile) {
  constexpr int64_t kMaxWordsOfRow = 4 * kThreads;  // in a tile
  Tiling tiling{};
  const int64_t units = pool.converts ? 1 : pool.pool_bytes_of_element;  // of which words consist, in an element
  const int word = WordOf(pool);
  tiling.words_of_inner = Divider(pool.inner * units / word);
  tiling.words_of_row = pool.row_elements() * units / word;
  tiling.words_of_scale = Divider(tiling.words_of_row / pool.num_scales);
  const int64_t words_of_tile_row = std::min(tiling.words_of_row, kMaxWordsOfRow);
  tiling.words_of_tile_row = ShortDivider(static_cast<uint64_t>(words_of_tile_row));
  const int64_t tiles_of_row = CeilDivide(tiling.words_of_row, words_of_tile_row);
  // A tile has at least a word for each thread, or else threads would be idle.
  const int64_t rows = tiles_of_row > 1 ? 1 : std::max(CeilDivide(kThreads, words_of_tile_row), most_rows_of_tile);
  tiling.rows_of_tile = static_cast<int>(std::min<int64_t>({rows, call.rows, kMaxRowsOfTile}));
  const int64_t tiles_of_batch_element = CeilDivide(call.rows, tiling.rows_of_tile) * tiles_of_row;
  tiling.tiles_of_row = static_cast<uint32_t>(tiles_of_row);  // CUDA rejects grids that do not fit
  tiling.tiles_of_batch_element = static_cast<uint32_t>(tiles_of_batch_element);
  tiling.num_tiles = call.batch * tiles_of_batch_element;
  return tiling;
}

// Launches the kernel for kPools pools, or fewer.
template <typename Word, int kPools>
CudaStatus LaunchPools(const Call& call, size_t first, size_t end, int64_t rows_of_tile, cudaStream_t stream) {
  LaunchArguments<kPools> launch{};
  launch.rows = {call.slot_of_row,
                 call.layer,
                 call.slot_of_row_is_shared,
                 call.layer_is_shared,
                 call.has_unique_slots,
                 call.layers,
                 call.slots,
                 call.rows};
  int64_t most_tiles = 0;
  for (size_t i = first; i < end; ++i) {
    Tiling& tiling = launch.tilings[i - first];
    launch.pools[i - first] = call.pools[i];
    tiling = TilingOf(call, call.pools[i], rows_of_tile);
    most_tiles = std::max(most_tiles, tiling.num_tiles);
  }
  const dim3 blocks(GridSize(most_tiles), static_cast<unsigned>(end - first));
  WriteRows<Word, kPools><<<blocks, kThreads, 0, stream>>>(launch);
  return JB_LAUNCH_STATUS(WriteRows);
}

using Launcher = CudaStatus (*)(const Call&, size_t first, size_t end, int64_t rows_of_tile, cudaStream_t);

template <typename Word>
Launcher LauncherOf(size_t pools) {
  constexpr size_t kFewPools = 2;
  return pools <= kFewPools ? LaunchPools<Word, kFewPools> : LaunchPools<Word, kMaxPools>;
}

Launcher LauncherOf(const Pool& pool, size_t pools) {
  const int word = WordOf(pool);
  if (pool.converts) {
    if (pool.row_bytes_of_element == 4) {
      return word == 1 ? LauncherOf<ConvertedWord<1, 4>>(pools) : LauncherOf<ConvertedWord<kConvertedLanes, 4>>(pools);
    }
    return word == 1 ? LauncherOf<ConvertedWord<1, 2>>(pools) : LauncherOf<ConvertedWord<kConvertedLanes, 2>>(pools);
  }
  switch (word) {
    case 1:
      return LauncherOf<CopiedWord<uint8_t>>(pools);
    case 2:
      return LauncherOf<CopiedWord<uint16_t>>(pools);
    case 4:
      return LauncherOf<CopiedWord<uint32_t>>(pools);
    case 8:
      return LauncherOf<CopiedWord<uint2>>(pools);
    default:
      return LauncherOf<CopiedWord<uint4>>(pools);
  }
}

}  // namespace

CudaStatus Call::Run(cudaStream_t stream) const {
  for (const Copy& copy : copies) JB_RETURN_IF_CUDA_ERROR(LaunchCopy(copy, stream));
  if (pools.empty()) return {};
  int multiprocessors = 0;
  JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
  // The tiles fill the GPU once, or a whole number of times. More rows in a tile save lookups.
  const size_t count = pools.size();
  const int64_t all_rows = MultiplySizes(batch, rows) * static_cast<int64_t>(count);
  const int64_t tiles_at_once = kBlocksPerMultiprocessor * int64_t{multiprocessors};
  const int64_t times = std::max<int64_t>(1, CeilDivide(all_rows, tiles_at_once * kMaxRowsOfTile));
  const int64_t rows_of_tile = CeilDivide(all_rows, tiles_at_once * times);
  for (size_t first = 0, end = 0; first < count; first = end) {
    const Pool& pool = pools[first];
    while (end < count && end - first < kMaxPools && HaveSameWords(pool, pools[end])) ++end;
    JB_RETURN_IF_CUDA_ERROR(LauncherOf(pool, end - first)(*this, first, end, rows_of_tile, stream));
  }
  return {};
}

}  // namespace jax_baracuda::write_rows
