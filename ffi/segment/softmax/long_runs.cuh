// Finishes the runs that tiles leave as carries (see tiles.cuh), in one launch.
//
// The blocks that start first merge the carries into the totals of the runs, as for other reductions (see MergeCarries
// in engine/tiles.cuh). Each of the other blocks has some tiles. If these left rows of long runs, the block waits for
// the totals and writes the rows. Blocks that merge wait for no others, so the waiting ends.
#pragma once

#include "ffi/segment/engine/tiles.cuh"
#include "ffi/segment/softmax/tiles.cuh"

namespace jax_baracuda::segment {

inline constexpr int kMaxLongRunLanes = 8;  // 128 bytes of float32, so that a block has many rows in flight
// Tiles per block: so few that there are about this many blocks, but not more than the maximum.
inline constexpr int kBlocksOfFewTiles = 1024, kMaxTilesPerBlock = 32;
inline constexpr int kLongRunThreads = kMergeThreads;
constexpr int LongRunBlocks(int64_t element_bytes) { return element_bytes == 8 ? 2 : 4; }  // per multiprocessor

template <typename T, bool kBackward>
struct LongRunArguments {
  SoftmaxTileArguments<T, kBackward> tiles;
  TileArguments<SoftmaxReduction<T, kBackward>> merge;  // what MergeCarries needs
  uint32_t merge_blocks;
  int tiles_per_block;
};

// Tiles use 0 as the maximum if they can. Weights are then scaled, so that they do not underflow before the division.
template <typename C>
__device__ __forceinline__ C Probability(const SoftmaxState<C>& state, C x) {
  const C scaled_sum = state.sum * static_cast<C>(sizeof(C) == 4 ? 0x1p56 : 1);
  if (state.maximum == C{0} && IsInRange(scaled_sum)) return AtMostOne(ScaledExp(x) * Reciprocal(scaled_sum));
  return AtMostOne(exp(x - state.maximum) * Reciprocal(state.sum));
}

template <typename T, int kVec, bool kBackward>
__global__ void __launch_bounds__(kLongRunThreads, LongRunBlocks(sizeof(T)))
    LongRunsKernel(const __grid_constant__ LongRunArguments<T, kBackward> arguments) {
  using C = ComputeType<T>;
  using Reduction = SoftmaxReduction<T, kBackward>;
  using Total = typename Reduction::Total;
  constexpr int kInFlight = kBackward ? 2 : 4;
  const SoftmaxTileArguments<T, kBackward>& a = arguments.tiles;
  __shared__ uint32_t block_number;
  __shared__ int left_rows[2 * kMaxTilesPerBlock];

  if (threadIdx.x == 0) block_number = atomicAdd(&a.counters->started, 1);
  __syncthreads();
  if (block_number < arguments.merge_blocks) {
    MergeBlock<Reduction, kVec>(arguments.merge, block_number, arguments.merge_blocks);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&a.counters->merged, 1);
    return;
  }

  const uint32_t columns = a.lanes.columns, block = block_number - arguments.merge_blocks;
  const int64_t first_tile = static_cast<int64_t>(block / columns) * arguments.tiles_per_block;
  const int tiles = static_cast<int>(min(a.tiles - first_tile, static_cast<int64_t>(arguments.tiles_per_block)));
  int own_rows = 0;
  if (static_cast<int>(threadIdx.x) < 2 * tiles) {
    own_rows = a.left_rows[2 * first_tile + threadIdx.x];
    left_rows[threadIdx.x] = own_rows;
  }
  if (!__syncthreads_or(own_rows > 0)) return;
  if (threadIdx.x == 0) {
    while (*static_cast<volatile uint32_t*>(&a.counters->merged) < arguments.merge_blocks) __nanosleep(40);
    __threadfence();
  }
  __syncthreads();

  const int lanes = a.lanes.lanes, groups = kLongRunThreads / lanes, group = threadIdx.x / lanes;
  const int64_t column = (static_cast<int64_t>(block % columns) * lanes + threadIdx.x % lanes) * kVec;
  if (group >= groups || column >= a.features) return;
  const auto load_row = [&](int input, int64_t row) {
    const int64_t place = a.rows.Place(row, a.is_shared[input]);
    return LoadStreaming<kVec>(a.inputs[input] + place * a.features + column);
  };
  for (int i = 0; i < 2 * tiles; ++i) {
    const int count = left_rows[i];
    if (count == 0) continue;
    const bool is_carry_out = i % 2 != 0;
    const int64_t tile = first_tile + i / 2, end_row = (tile + 1) * a.own_rows;
    const int64_t first_row = is_carry_out ? end_row - count : tile * a.own_rows;
    const int64_t run = is_carry_out ? a.rows.Key(end_row - 1) : a.carries.in_segment[tile];
    Total total[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) total[j] = a.totals[run * a.features + column + j];
    for (int row = group; row < count; row += kInFlight * groups) {
      Vector<T, kVec> values[kInFlight];
      [[maybe_unused]] Vector<T, kVec> d_values[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int64_t loaded = first_row + min(row + u * groups, count - 1);
        values[u] = load_row(0, loaded);
        if constexpr (kBackward) d_values[u] = load_row(1, loaded);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (row + u * groups >= count) continue;
        Vector<T, kVec> result;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const C value = static_cast<C>(values[u].lane[j]);
          if constexpr (kBackward) {
            result.lane[j] = static_cast<T>(SoftmaxGradient(value, static_cast<C>(d_values[u].lane[j]), total[j]));
          } else {
            result.lane[j] = static_cast<T>(Probability(total[j], value));
          }
        }
        StoreStreaming(a.output + a.rows.Place(first_row + row + u * groups) * a.features + column, result);
      }
    }
  }
}

}  // namespace jax_baracuda::segment
