// Softmax and its gradient for few rows in any order, in one launch: small problems are launch-bound.
//
// A block owns some segments and a column of features. It reads the ids of all rows, and lists the rows of its segments
// in the order of segments and rows. A warp processes each segment, or the whole block if the segment has many rows.
// The order of additions depends on shapes and ids only.
#pragma once

#include "ffi/segment/softmax/tiles.cuh"

namespace jax_baracuda::segment {

inline constexpr int kSmallSoftmaxThreads = 512;
inline constexpr int kSmallWarps = kSmallSoftmaxThreads / 32;
inline constexpr int kMaxSmallRows = 16384;    // in the whole batch
inline constexpr int kMaxSmallSegments = 128;  // per block
inline constexpr int kMaxWarpSteps = 32;       // a segment that takes a warp more steps is processed by the whole block

// Maximum number of threads per row.
constexpr int MaxSmallLanes(int vector) { return vector > 1 ? 8 : 32; }

template <typename T>
struct SmallArguments {
  OrderedRows rows;    // in memory order, not sorted
  const T* inputs[2];  // logits; or probabilities and their cotangents
  bool is_shared[2];   // by a batch of more than one
  T* output;
  int features;
  int lanes;    // threads per row, a power of two
  int columns;  // columns of `lanes` vectors
  int block_segments;
};

template <typename T, int kVec, bool kBackward>
__global__ void __launch_bounds__(kSmallSoftmaxThreads, 2) SmallKernel(const __grid_constant__ SmallArguments<T> a) {
  using C = ComputeType<T>;
  using Cells = Vector<C, kVec>;
  __shared__ uint16_t own_rows[kMaxSmallRows];
  __shared__ int next_places[kSmallWarps][kMaxSmallSegments];  // next position in own_rows
  __shared__ int starts[kMaxSmallSegments + 1];                // first position of each segment in own_rows
  __shared__ bool has_long;                                    // whether the whole block has to process some segments
  __shared__ Cells partials[kSmallWarps][MaxSmallLanes(kVec)];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int segment_block = blockIdx.x / a.columns, column = blockIdx.x - segment_block * a.columns;
  const int first_segment = segment_block * a.block_segments;
  const int segments = min(a.block_segments, static_cast<int>(a.rows.segments) - first_segment);
  const int rows = static_cast<int>(a.rows.count);

  // Each warp lists a range of neighbouring rows, at most 32 per lane.
  constexpr int kInFlight = 8;
  const int share = (rows + kSmallSoftmaxThreads - 1) / kSmallSoftmaxThreads * 32;
  const int first_row = warp * share, end_row = min(first_row + share, rows);
  const bool is_plain = a.rows.IsPlain();
  const int* const ids = static_cast<const int*>(a.rows.ids.ids);
  // The segment's number in the block, or -1 if it is another block's. Segments are so few that ids cannot wrap around.
  const auto own_segment = [&](int key) {
    const uint32_t own = static_cast<uint32_t>(key) - static_cast<uint32_t>(first_segment);
    return own < static_cast<uint32_t>(segments) ? static_cast<int>(own) : -1;
  };
  const auto key_at = [&](int row) { return is_plain ? __ldg(ids + row) : static_cast<int>(a.rows.Key(row)); };
  // Calls take(i, segment) for the lane's rows first_row + i * 32 + lane.
  const auto for_segments = [&](auto&& take) {
    for (int i = 0; first_row + i * 32 < end_row; i += kInFlight) {
      int segment[kInFlight];
      const int row = first_row + i * 32 + lane;
      if (is_plain) {
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) segment[u] = __ldg(ids + min(row + u * 32, rows - 1));
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) segment[u] = row + u * 32 < end_row ? own_segment(segment[u]) : -1;
      } else {
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          segment[u] = row + u * 32 < end_row ? own_segment(static_cast<int>(a.rows.Key(row + u * 32))) : -1;
        }
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) take(i + u, segment[u]);
    }
  };
  const int max_warp_rows = kMaxWarpSteps * (32 / a.lanes);
  const uint32_t lower_lanes = (1u << lane) - 1;
  for (int i = threadIdx.x; i < kSmallWarps * kMaxSmallSegments; i += kSmallSoftmaxThreads) {
    next_places[i / kMaxSmallSegments][i % kMaxSmallSegments] = 0;
  }
  __syncthreads();
  uint32_t has_own = 0;  // bit mask: the i at which the warp has rows of the block's segments
  for_segments([&](int i, int segment) {
    if (segment >= 0) atomicAdd(&next_places[warp][segment], 1);
    has_own |= __any_sync(kFullWarp, segment >= 0) ? 1u << i : 0;
  });
  __syncthreads();
  if (warp == 0) {
    int start = 0, max_count = 0;
    for (int first = 0; first < segments; first += 32) {
      const int segment = first + lane;
      int count = 0;
      for (int w = 0; segment < segments && w < kSmallWarps; ++w) count += next_places[w][segment];
      int end = count;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(kFullWarp, end, step);
        if (lane >= step) end += before;
      }
      max_count = max(max_count, count);
      int place = start + end - count;
      if (segment < segments) {
        starts[segment] = place;
        for (int w = 0; w < kSmallWarps; ++w) {
          const int warp_count = next_places[w][segment];
          next_places[w][segment] = place;
          place += warp_count;
        }
      }
      start += __shfl_sync(kFullWarp, end, 31);
    }
    max_count = __reduce_max_sync(kFullWarp, max_count);
    if (lane == 0) {
      starts[segments] = start;
      has_long = max_count > max_warp_rows;
    }
  }
  __syncthreads();
  for (uint32_t left = has_own; left != 0; left &= left - 1) {
    const int row = first_row + (__ffs(left) - 1) * 32 + lane;
    const int segment = row < end_row ? own_segment(key_at(row)) : -1;
    const uint32_t owners = __ballot_sync(kFullWarp, segment >= 0);
    const uint32_t peers = (owners & (owners - 1)) == 0 ? 1u << lane : __match_any_sync(kFullWarp, segment);
    int place = 0;
    if (segment >= 0) place = next_places[warp][segment] + __popc(peers & lower_lanes);
    __syncwarp();
    if (segment >= 0 && (peers & lower_lanes) == 0) next_places[warp][segment] += __popc(peers);
    if (segment >= 0) own_rows[place] = static_cast<uint16_t>(row);
    __syncwarp();
  }
  __syncthreads();

  const int row_lane = lane % a.lanes;
  const int feature = (column * a.lanes + row_lane) * kVec;
  const bool is_active = feature < a.features;
  // Processes the rows of one segment, by a warp or by the whole block.
  const auto take_segment = [&](auto whole_block, int segment) {
    constexpr bool kWholeBlock = decltype(whole_block)::value;
    const int group = (kWholeBlock ? static_cast<int>(threadIdx.x) : lane) / a.lanes;
    const int groups = (kWholeBlock ? kSmallSoftmaxThreads : 32) / a.lanes;
    const int begin = starts[segment], end = starts[segment + 1];
    const auto load_row = [&](int input, int row) {
      const int place = a.is_shared[input] ? row % static_cast<int>(a.rows.batch_rows) : row;
      return LoadVector<kVec>(a.inputs[input] + place * a.features + feature);
    };
    const auto for_rows = [&](auto&& body) {
      constexpr int kInFlight = kWholeBlock && !kBackward ? 8 : 4;
      if (!is_active) return;
      for (int i = begin + group; i < end; i += kInFlight * groups) {
        Vector<T, kVec> values[kInFlight];
        [[maybe_unused]] Vector<T, kVec> d_values[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const int row = own_rows[min(i + u * groups, end - 1)];
          values[u] = load_row(0, row);
          if constexpr (kBackward) d_values[u] = load_row(1, row);
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          if (i + u * groups < end) body(i + u * groups, values[u], d_values[u]);
        }
      }
    };
    const auto reduce = [&](Cells cells, auto&& combine) {
      for (int step = a.lanes; step < 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          cells.lane[i] = combine(cells.lane[i], __shfl_xor_sync(kFullWarp, cells.lane[i], step));
        }
      }
      if constexpr (kWholeBlock) {
        if (lane < a.lanes) partials[warp][lane] = cells;
        __syncthreads();
        cells = partials[0][row_lane];
        for (int w = 1; w < kSmallWarps; ++w) CombineInto(cells, partials[w][row_lane], combine);
        __syncthreads();
      }
      return cells;
    };
    const auto write = [&](int place, const Cells& cells) {
      Vector<T, kVec> result;
#pragma unroll
      for (int i = 0; i < kVec; ++i) result.lane[i] = static_cast<T>(cells.lane[i]);
      StoreStreaming(a.output + own_rows[place] * a.features + feature, result);
    };
    const auto add = [](C x, C y) { return x + y; };
    Cells sums = Repeat<kVec>(C{0}), results;
    if constexpr (kBackward) {
      for_rows([&](int, const auto& values, const auto& d_values) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          sums.lane[i] += static_cast<C>(values.lane[i]) * static_cast<C>(d_values.lane[i]);
        }
      });
      sums = reduce(sums, add);
      for_rows([&](int place, const auto& values, const auto& d_values) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          results.lane[i] =
              SoftmaxGradient(static_cast<C>(values.lane[i]), static_cast<C>(d_values.lane[i]), sums.lane[i]);
        }
        write(place, results);
      });
    } else {
      Cells maxima = Repeat<kVec>(-std::numeric_limits<C>::infinity());
      for_rows([&](int, const auto& values, const auto&) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          sums.lane[i] += ScaledExp(static_cast<C>(values.lane[i]));
          maxima.lane[i] = HardwareLarger(maxima.lane[i], static_cast<C>(values.lane[i]));
        }
      });
      sums = reduce(sums, add);
      bool needs_maxima = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) needs_maxima |= is_active && !IsInRange(sums.lane[i]);
      needs_maxima = kWholeBlock ? __syncthreads_or(needs_maxima) : __any_sync(kFullWarp, needs_maxima);
      if (needs_maxima) {
        maxima = reduce(maxima, [](C x, C y) { return HardwareLarger(x, y); });
        sums = Repeat<kVec>(C{0});
        for_rows([&](int, const auto& values, const auto&) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) sums.lane[i] += exp(static_cast<C>(values.lane[i]) - maxima.lane[i]);
        });
        sums = reduce(sums, add);
      }
      for_rows([&](int place, const auto& values, const auto&) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const C x = static_cast<C>(values.lane[i]);
          const C weight = needs_maxima ? exp(x - maxima.lane[i]) : ScaledExp(x);
          results.lane[i] = AtMostOne(weight * Reciprocal(sums.lane[i]));
        }
        write(place, results);
      });
    }
  };
  const auto is_long = [&](int segment) { return starts[segment + 1] - starts[segment] > max_warp_rows; };
  for (int segment = warp; segment < segments; segment += kSmallWarps) {
    if (!is_long(segment)) take_segment(std::false_type{}, segment);
  }
  for (int segment = 0; has_long && segment < segments; ++segment) {
    if (is_long(segment)) take_segment(std::true_type{}, segment);
  }

  // Dropped rows get 0. The warps of all blocks of the column share them.
  const int blocks = gridDim.x / a.columns;
  for (int first = (segment_block * kSmallWarps + warp) * 32; first < rows; first += blocks * kSmallSoftmaxThreads) {
    const bool is_dropped =
        first + lane < rows && static_cast<uint32_t>(key_at(first + lane)) >= static_cast<uint32_t>(a.rows.segments);
    for (uint32_t left = __ballot_sync(kFullWarp, is_dropped); left != 0; left &= left - 1) {
      T* const to = a.output + (first + __ffs(left) - 1) * a.features + feature;
      if (is_active && lane < a.lanes) StoreVector(to, Repeat<kVec>(static_cast<T>(C{0})));
    }
  }
}

}  // namespace jax_baracuda::segment
