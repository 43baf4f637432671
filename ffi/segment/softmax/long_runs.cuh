// Finishes the runs that tiles leave as carries (see tiles.cuh).
#pragma once

#include "ffi/segment/softmax/tiles.cuh"

namespace jax_baracuda::segment {

inline constexpr int kLongRunThreads = 512;
inline constexpr int kLongRunWarps = kLongRunThreads / 32;
inline constexpr int kMaxLongRunLanes = 8;  // 128 bytes of float32, so that a warp has several rows in flight
constexpr int LongRunBlocks(int64_t element_bytes) { return element_bytes == 8 ? 1 : 2; }  // per multiprocessor

// Partially merged carries of one run, for kVec neighbouring features.
template <typename C, int kVec, bool kBackward>
struct CarryState {
  SoftmaxState<C> cells[kVec];

  __device__ __forceinline__ void Load(const C* carry, int64_t features) {
    const Vector<C, kVec> sum = LoadVector<kVec>(carry + (kBackward ? 0 : features));
    const Vector<C, kVec> maximum = kBackward ? sum : LoadVector<kVec>(carry);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      cells[i].maximum = maximum.lane[i];
      // If all rows are -inf, the carry's sum is NaN; the state needs 0.
      const bool is_lowest = !kBackward && maximum.lane[i] == -std::numeric_limits<C>::infinity();
      cells[i].sum = is_lowest ? C{0} : sum.lane[i];
    }
  }
  __device__ __forceinline__ CarryState FromLane(int lane) const {
    CarryState other;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if constexpr (!kBackward) other.cells[i].maximum = __shfl_sync(kFullWarp, cells[i].maximum, lane);
      other.cells[i].sum = __shfl_sync(kFullWarp, cells[i].sum, lane);
    }
    return other;
  }
  __device__ __forceinline__ void Merge(const CarryState& other) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (kBackward || (cells[i].maximum == C{0} && other.cells[i].maximum == C{0})) {
        cells[i].sum += other.cells[i].sum;
      } else {
        MergeSoftmax(cells[i], other.cells[i]);
      }
    }
  }
};

// Tiles use 0 as the maximum if they can. Weights are then scaled, so that they do not underflow before the division.
template <typename C>
__device__ __forceinline__ C Probability(const SoftmaxState<C>& state, C x) {
  const C scaled_sum = state.sum * static_cast<C>(sizeof(C) == 4 ? 0x1p56 : 1);
  if (state.maximum == C{0} && IsInRange(scaled_sum)) return AtMostOne(ScaledExp(x) * Reciprocal(scaled_sum));
  return AtMostOne(exp(x - state.maximum) * Reciprocal(state.sum));
}

// The number of leading i in [0, limit) for which is_member(i) holds. The whole warp searches, in few steps.
template <typename IsMember>
__device__ __forceinline__ int64_t CountLeading(int64_t limit, IsMember&& is_member) {
  const int lane = threadIdx.x % 32;
  const auto leading = [&](bool holds) {
    const uint32_t fails = ~__ballot_sync(kFullWarp, holds);
    return fails == 0 ? 32 : __ffs(fails) - 1;
  };
  const int64_t probe = (int64_t{1} << lane) - 1;
  const int powers = leading(probe < limit && is_member(probe));
  int64_t low = powers == 0 ? 0 : int64_t{1} << (powers - 1);
  int64_t high = min(limit, (int64_t{1} << powers) - 1);
  while (low < high) {
    const int64_t step = (high - low + 31) / 32, i = low + (lane + 1) * step - 1;
    low += leading(i < high && is_member(i)) * step;
    high = min(high, low + step - 1);
  }
  return low;
}

// Finds the carries of long runs by rank, from the flags of their tiles.
class CarryFinder {
 public:
  // Called by the whole block.
  __device__ __forceinline__ CarryFinder(const uint8_t* has_carries, int64_t tiles, int (&warp_carries)[kLongRunWarps])
      : flags_(reinterpret_cast<const uint32_t*>(has_carries)), tiles_(tiles), warp_carries_(warp_carries) {
    const int warp = threadIdx.x / 32;
    const int64_t words = (tiles + 3) / 4;
    warp_words_ = (words + kLongRunThreads - 1) / kLongRunThreads * 32;
    int found = 0;
#pragma unroll 8
    for (int64_t i = 0; i < warp_words_; i += 32) found += __popc(Word(warp * warp_words_ + i));
    found = __reduce_add_sync(kFullWarp, found);
    if (threadIdx.x % 32 == 0) warp_carries[warp] = found;
    __syncthreads();
    for (int w = 0; w < kLongRunWarps; ++w) count_ += warp_carries[w];
  }
  __device__ __forceinline__ int Count() const { return count_; }

  // The index of the carry of this rank. Ranks must not decrease from call to call. Called by the whole warp.
  __device__ __forceinline__ int64_t Find(int rank) {
    const int lane = threadIdx.x % 32;
    if (next_words_ == 0) {
      int warp = 0;
      while (before_ + warp_carries_[warp] <= rank) before_ += warp_carries_[warp++];
      next_words_ = warp * warp_words_;
      Advance();
    }
    while (before_ + in_words_ <= rank) {
      before_ += in_words_;
      Advance();
    }
    const int skipped = rank - before_ - lower_lanes_;
    const uint32_t owner = __ballot_sync(kFullWarp, skipped >= 0 && skipped < __popc(word_));
    uint32_t left = word_;
    for (int i = 0; i < min(skipped, kMaxCarries - 1); ++i) left &= left - 1;
    const int bit = __ffs(left) - 1;
    const int64_t carry = 2 * (4 * (next_words_ - 32 + lane) + bit / 8) + bit % 8;
    return __shfl_sync(kFullWarp, carry, __ffs(owner) - 1);
  }

 private:
  static constexpr int kMaxCarries = 8;  // per word

  // The flags of the lane's four tiles.
  __device__ __forceinline__ uint32_t Word(int64_t first_word) const {
    const int64_t word = first_word + threadIdx.x % 32, left = tiles_ - 4 * word;
    if (left <= 0) return 0;
    return left >= 4 ? flags_[word] : flags_[word] & ((1u << (8 * left)) - 1);
  }
  __device__ __forceinline__ void Advance() {
    const int lane = threadIdx.x % 32;
    word_ = Word(next_words_);
    next_words_ += 32;
    int up_to_own = __popc(word_);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int lower = __shfl_up_sync(kFullWarp, up_to_own, step);
      if (lane >= step) up_to_own += lower;
    }
    lower_lanes_ = up_to_own - __popc(word_);
    in_words_ = __shfl_sync(kFullWarp, up_to_own, 31);
  }

  const uint32_t* flags_;
  int64_t tiles_;
  const int* warp_carries_;
  int64_t warp_words_;
  int count_ = 0;
  // The current 32 words, which end at next_words_.
  int64_t next_words_ = 0;
  int before_ = 0, in_words_ = 0, lower_lanes_ = 0;
  uint32_t word_ = 0;
};

// Writes the rows of long runs. Each warp owns an equal number of carries, or of fractions of carries if there are few.
// It merges all carries of every run that it finds. If all carries of a block are of one run, the block merges them
// once.
template <typename T, int kVec, bool kBackward>
__global__ void __launch_bounds__(kLongRunThreads, LongRunBlocks(sizeof(T)))
    LongRunsKernel(const __grid_constant__ SoftmaxTileArguments<T> a) {
  using C = ComputeType<T>;
  using State = CarryState<C, kVec, kBackward>;
  constexpr int kStates = kBackward ? 1 : 2, kInFlight = kBackward ? 2 : 4;
  __shared__ int warp_carries[kLongRunWarps];
  __shared__ State warp_states[kLongRunWarps][kMaxLongRunLanes];

  CarryFinder carries(a.has_carries, a.tiles, warp_carries);
  const int lanes = a.lanes.lanes, groups = 32 / lanes;
  const int warp_lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp_lane / lanes, lane = warp_lane - group * lanes;
  const uint32_t column_blocks = gridDim.x / a.lanes.columns, block = blockIdx.x % column_blocks;
  const int64_t column = (static_cast<int64_t>(blockIdx.x / column_blocks) * lanes + lane) * kVec;
  const bool is_active = group < groups && column < a.features;
  const int64_t workers = int64_t{column_blocks} * kLongRunWarps;
  State total;

  // Merges carries [begin, end) of the run that starts in tile `first`. Carry 0 is the carry-out of that tile, carry i
  // the carry-in of tile first + i.
  const auto merge = [&](int64_t first, int64_t begin, int64_t end) {
    const int64_t num_carries = end - begin;
    const auto load = [&](int64_t i) {
      State state;
      state.Load(a.carry_states + ((first + begin + i) * 2 + (begin + i == 0)) * kStates * a.features + column,
                 a.features);
      return state;
    };
    total = State{};
    if (is_active && group < num_carries) {
      total = load(group);
#pragma unroll kBackward ? 4 : 2
      for (int64_t i = group + groups; i < num_carries; i += groups) total.Merge(load(i));
    }
    for (int left = static_cast<int>(min(int64_t{groups}, num_carries)); left > 1; left = (left + 1) / 2) {
      const int half = (left + 1) / 2;
      const State other = total.FromLane(warp_lane + half * lanes);
      if (is_active && group + half < left) total.Merge(other);
    }
    total = total.FromLane(lane);
  };
  // Finds the run's first tile and the number of its carries, given one of them.
  const auto find_run = [&](RunKey run, int64_t carry, int64_t* num_carries) {
    const int64_t tile = carry / 2;
    const auto enters = [&](int64_t other) { return a.carries[2 * other].run == run; };
    const int64_t after = CountLeading(a.tiles - 1 - tile, [&](int64_t i) { return enters(tile + 1 + i); });
    const int64_t before =
        carry % 2 != 0 ? 0 : 1 + CountLeading(tile - 1, [&](int64_t i) { return enters(tile - 1 - i); });
    const int64_t first = tile - min(before, tile);
    *num_carries = tile + after + 1 - first;
    return first;
  };
  const auto write_rows = [&](int64_t first_row, int count) {
    const auto load_row = [&](int input, int64_t row) {
      const int64_t place = a.rows.Place(row, a.is_shared[input]);
      return LoadStreaming<kVec>(a.inputs[input] + place * a.features + column);
    };
    for (int i = group; i < count; i += kInFlight * groups) {
      Vector<T, kVec> values[kInFlight];
      [[maybe_unused]] Vector<T, kVec> d_values[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int64_t row = first_row + min(i + u * groups, count - 1);
        values[u] = load_row(0, row);
        if constexpr (kBackward) d_values[u] = load_row(1, row);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (i + u * groups >= count) continue;
        Vector<T, kVec> result;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const C value = static_cast<C>(values[u].lane[j]);
          if constexpr (kBackward) {
            result.lane[j] =
                static_cast<T>(SoftmaxGradient(value, static_cast<C>(d_values[u].lane[j]), total.cells[j].sum));
          } else {
            result.lane[j] = static_cast<T>(Probability(total.cells[j], value));
          }
        }
        StoreStreaming(a.output + a.rows.Place(first_row + i + u * groups) * a.features + column, result);
      }
    }
  };

  constexpr int kMaxShares = 8;
  const int count = carries.Count();
  if (count == 0) return;
  const int shares = static_cast<int>(min((2 * workers + count - 1) / count, int64_t{kMaxShares}));
  const int64_t tasks = static_cast<int64_t>(count) * shares;
  const auto first_task = [&](int64_t worker) { return worker * tasks / workers; };
  const int64_t worker = int64_t{block} * kLongRunWarps + warp;
  const int64_t begin = first_task(worker), end = first_task(worker + 1);
  RunKey merged_run = kNoRun;
  if (count >= workers) {
    const int64_t block_begin = first_task(int64_t{block} * kLongRunWarps) / shares;
    const int64_t block_last = (first_task((int64_t{block} + 1) * kLongRunWarps) - 1) / shares;
    CarryFinder of_block = carries;
    const int64_t carry = of_block.Find(static_cast<int>(block_begin));
    const RunKey run = a.carries[carry].run;
    if (run == a.carries[of_block.Find(static_cast<int>(block_last))].run) {
      int64_t num_carries;
      const int64_t first = find_run(run, carry, &num_carries);
      merge(first, warp * num_carries / kLongRunWarps, (warp + 1) * num_carries / kLongRunWarps);
      if (group == 0) warp_states[warp][lane] = total;
      __syncthreads();
      total = State{};
      bool is_first = true;
#pragma unroll 1
      for (int w = 0; w < kLongRunWarps; ++w) {
        if (w * num_carries / kLongRunWarps == (w + 1) * num_carries / kLongRunWarps) continue;
        if (is_first) {
          total = warp_states[w][lane];
        } else {
          total.Merge(warp_states[w][lane]);
        }
        is_first = false;
      }
      merged_run = run;
    }
  }
  for (int64_t task = begin; task < end; ++task) {
    const int rank = static_cast<int>(task / shares), share = static_cast<int>(task - int64_t{rank} * shares);
    const int64_t carry = carries.Find(rank), tile = carry / 2;
    const RunCarry own = a.carries[carry];
    if (own.run != merged_run) {
      int64_t num_carries;
      const int64_t first = find_run(own.run, carry, &num_carries);
      merge(first, 0, num_carries);
      merged_run = own.run;
    }
    // A carry-out covers the last own rows of its tile, a carry-in the first ones.
    const int64_t first_row = tile * a.own_rows + (carry % 2 != 0 ? a.own_rows - own.rows : 0);
    const int share_rows = (own.rows + shares - 1) / shares;
    if (is_active) write_rows(first_row + share * share_rows, min(share_rows, own.rows - share * share_rows));
    __syncwarp();
  }
}

}  // namespace jax_baracuda::segment
