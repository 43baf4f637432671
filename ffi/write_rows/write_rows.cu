// The CUDA kernel of write_rows. One launch writes the rows of all pools.
//
// A block writes a tile: some consecutive rows, or a part of one long row. While it finds out which of its rows to
// write, their numbers are on their way, because these loads do not depend on slots.

#include <algorithm>
#include <cstdint>

#include "ffi/core/device_attributes.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/launch_bounds.cuh"
#include "ffi/core/vectors.cuh"
#include "ffi/write_rows/rows_device.cuh"
#include "ffi/write_rows/write_rows.cuh"

namespace jax_baracuda::write_rows {
namespace {

inline constexpr int kBlocksPerMultiprocessor = 3;  // minimum resident blocks, which caps the registers
inline constexpr int kConvertedLanes = 8;           // numbers of a word that is converted, if vectors fit

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

// Words of kLanes numbers of kBytes each, which are scaled and converted. They stay as they are until they are stored,
// so that nothing waits for their loads before.
template <int kLanes, int kBytes>
struct ConvertedWords {
  static constexpr int kCount = kBytes == 4 ? 2 : 4;  // as many as registers hold
  using Raw = Vector<std::conditional_t<kBytes == 4, uint32_t, uint16_t>, kLanes>;

  Raw words[kCount];

  template <typename At>
  __device__ __forceinline__ void Load(const Pool& pool, const At& at) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t from = at(i);
      if (from >= 0) words[i] = static_cast<const Raw*>(pool.rows)[from];
    }
  }

  // `scale`: nullptr for 1.
  __device__ __forceinline__ void Store(const Pool& pool, const float* scale, int i, int64_t to) const {
    float numbers[kLanes] = {};
    DispatchRows(pool.from, [&](auto tag) {
      using From = typename decltype(tag)::type;
      if constexpr (sizeof(From) == kBytes) WidenLanes<From, kLanes>(&words[i], numbers);
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

template <typename Words>
__device__ __forceinline__ void WriteTile(const Rows& launch, const Pool& pool, const Tiling& tiling,
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

  RowBits overwritten = 0;
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

template <int kPools>
__global__ void __launch_bounds__(kThreads, MinBlocks(kThreads, kBlocksPerMultiprocessor))
    WriteRows(const __grid_constant__ LaunchArguments<kPools> launch) {
  __shared__ TileRows tile_rows;
  const Rows& rows = launch.rows;
  const Pool& pool = launch.pools[blockIdx.y];
  const Tiling& tiling = launch.tilings[blockIdx.y];
  if (int64_t{blockIdx.x} >= tiling.num_tiles) return;
  if (pool.converts) {
    const bool are_wide = pool.row_bytes_of_element == 4;
    if (tiling.word == 1 && are_wide) return WriteTile<ConvertedWords<1, 4>>(rows, pool, tiling, &tile_rows);
    if (tiling.word == 1) return WriteTile<ConvertedWords<1, 2>>(rows, pool, tiling, &tile_rows);
    if (are_wide) return WriteTile<ConvertedWords<kConvertedLanes, 4>>(rows, pool, tiling, &tile_rows);
    return WriteTile<ConvertedWords<kConvertedLanes, 2>>(rows, pool, tiling, &tile_rows);
  }
  switch (tiling.word) {
    case 1:
      return WriteTile<CopiedWords<uint8_t>>(rows, pool, tiling, &tile_rows);
    case 2:
      return WriteTile<CopiedWords<uint16_t>>(rows, pool, tiling, &tile_rows);
    case 4:
      return WriteTile<CopiedWords<uint32_t>>(rows, pool, tiling, &tile_rows);
    case 8:
      return WriteTile<CopiedWords<uint2>>(rows, pool, tiling, &tile_rows);
    default:
      return WriteTile<CopiedWords<uint4>>(rows, pool, tiling, &tile_rows);
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

// Launches the kernel for kPools pools, or fewer.
template <int kPools>
CudaStatus LaunchPools(const Call& call, int first, int count, int64_t rows_of_tile, cudaStream_t stream) {
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
  for (int i = 0; i < count; ++i) {
    launch.pools[i] = call.pools[first + i];
    launch.tilings[i] = TilingOf(call, launch.pools[i], rows_of_tile);
    most_tiles = std::max(most_tiles, launch.tilings[i].num_tiles);
  }
  WriteRows<kPools><<<dim3(GridSize(most_tiles), count), kThreads, 0, stream>>>(launch);
  return JB_LAUNCH_STATUS(WriteRows);
}

}  // namespace

CudaStatus CopyPools(const std::vector<Copy>& copies, cudaStream_t stream) {
  for (const Copy& copy : copies) {
    const size_t bytes = static_cast<size_t>(copy.bytes);
    JB_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(copy.to, copy.from, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  return {};
}

CudaStatus Launch(const Call& call, cudaStream_t stream) {
  JB_RETURN_IF_CUDA_ERROR(CopyPools(call.copies, stream));
  if (call.pools.empty()) return {};
  int multiprocessors = 0;
  JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
  const int count = static_cast<int>(call.pools.size());
  // The tiles fill the GPU once, or a whole number of times. More rows in a tile save lookups.
  const int64_t rows = MultiplySizes(call.batch, call.rows) * count;
  const int64_t tiles_at_once = kBlocksPerMultiprocessor * int64_t{multiprocessors};
  const int64_t times = std::max<int64_t>(1, CeilDivide(rows, tiles_at_once * kMaxRowsOfTile));
  const int64_t rows_of_tile = CeilDivide(rows, tiles_at_once * times);
  for (int first = 0; first < count; first += kMaxPools) {
    const int pools_of_launch = std::min(count - first, kMaxPools);
    constexpr int kFewPools = 2;
    const auto launch = pools_of_launch <= kFewPools ? LaunchPools<kFewPools> : LaunchPools<kMaxPools>;
    JB_RETURN_IF_CUDA_ERROR(launch(call, first, pools_of_launch, rows_of_tile, stream));
  }
  return {};
}

}  // namespace jax_baracuda::write_rows
