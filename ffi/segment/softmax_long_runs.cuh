// The runs that windows leave as pieces: see softmax_windows.cuh.
#pragma once

#include "ffi/segment/softmax_windows.cuh"

namespace jax_baracuda::segment {

inline constexpr int kLongRunThreads = 128;

// Pieces of one run, for kVec neighbouring features, under reduction.
template <typename C, int kVec, bool kBackward>
struct PieceState {
  SoftmaxState<C> cells[kVec];

  __device__ __forceinline__ void Load(const C* piece, int64_t features) {
    const Vector<C, kVec> sum = LoadVector<kVec>(piece + (kBackward ? 0 : features));
    const Vector<C, kVec> maximum = kBackward ? sum : LoadVector<kVec>(piece);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      cells[i].maximum = maximum.lane[i];
      // The weights of rows that are all -inf are NaN.
      const bool is_lowest = !kBackward && maximum.lane[i] == -std::numeric_limits<C>::infinity();
      cells[i].sum = is_lowest ? C{0} : sum.lane[i];
    }
  }
  __device__ __forceinline__ void Merge(const PieceState& other) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if constexpr (kBackward) {
        cells[i].sum += other.cells[i].sum;
      } else {
        MergeSoftmax(cells[i], other.cells[i]);
      }
    }
  }
};

// Windows take 0 for the maximum where they can; then weights must not underflow before the sum divides them.
template <typename C>
__device__ __forceinline__ C Probability(const SoftmaxState<C>& state, C x) {
  const C scaled_sum = state.sum * static_cast<C>(sizeof(C) == 4 ? 0x1p56 : 1);
  if (state.maximum == C{0} && IsInRange(scaled_sum)) return AtMostOne(ScaledExp(x) * Reciprocal(scaled_sum));
  return AtMostOne(exp(x - state.maximum) * Reciprocal(state.sum));
}

// Writes the rows of long runs. Pieces are dealt to the blocks a few at a time, so that all blocks share a hot segment;
// each merges the pieces of the runs that it meets.
template <typename T, int kVec, bool kBackward>
__global__ void __launch_bounds__(kLongRunThreads) LongRunsKernel(const __grid_constant__ WindowArguments<T> a) {
  using C = ComputeType<T>;
  using State = PieceState<C, kVec, kBackward>;
  constexpr int kStates = kBackward ? 1 : 2, kInFlight = 4;
  __shared__ uint32_t shared_pieces[kLongRunThreads / 32];
  __shared__ State shared_states[kLongRunThreads];

  const int lanes = a.lanes.lanes, groups = kLongRunThreads / lanes;
  const int group = threadIdx.x / lanes, lane = threadIdx.x - group * lanes;
  const int64_t workers = gridDim.x / a.lanes.columns, worker = blockIdx.x / a.lanes.columns;
  const int64_t column = (blockIdx.x % a.lanes.columns * static_cast<int64_t>(lanes) + lane) * kVec;
  const bool is_active = group < groups && column < a.features;
  RunKey merged_key = kNoRun;
  State total;

  const auto load_row = [&](int input, int64_t row) {
    const int64_t place = a.rows.Place(row, a.is_shared[input]);
    return LoadStreaming<T, kVec>(a.inputs[input] + place * a.features + column);
  };
  const auto take_piece = [&](int64_t piece) {
    const int64_t chunk = piece / 2;
    const bool is_tail = piece % 2 != 0;
    const RunKey key = a.run_keys[piece];
    if (key != merged_key) {
      // The run's pieces: the tail of one chunk, then the heads of the chunks [begin, end).
      int64_t begin = is_tail ? chunk + 1 : chunk, end = chunk + 1;
      for (bool goes_left = !is_tail, goes_right = true; goes_left || goes_right;) {
        const int64_t before = begin - 1 - static_cast<int>(threadIdx.x), after = end + threadIdx.x;
        const bool is_before = goes_left && before >= 0 && a.run_keys[2 * before] == key;
        const bool is_after = goes_right && after < a.chunks && a.run_keys[2 * after] == key;
        const int found_before = __syncthreads_count(is_before), found_after = __syncthreads_count(is_after);
        begin -= found_before;
        end += found_after;
        goes_left = found_before == kLongRunThreads;
        goes_right = found_after == kLongRunThreads;
      }
      const int64_t first = begin > 0 ? begin - 1 : 0, pieces = end - first;
      const auto load = [&](int64_t i) {
        State state;
        state.Load(a.pieces + ((first + i) * 2 + (i == 0)) * kStates * a.features + column, a.features);
        return state;
      };
      if (is_active && group < pieces) {
        total = load(group);
        for (int64_t i = group + groups; i < pieces; i += kInFlight * groups) {
          State others[kInFlight];
#pragma unroll
          for (int u = 0; u < kInFlight; ++u) {
            if (i + u * groups < pieces) others[u] = load(i + u * groups);
          }
#pragma unroll
          for (int u = 0; u < kInFlight; ++u) {
            if (i + u * groups < pieces) total.Merge(others[u]);
          }
        }
        shared_states[threadIdx.x] = total;
      }
      for (int left = static_cast<int>(min(static_cast<int64_t>(groups), pieces)); left > 1; left = (left + 1) / 2) {
        const int half = (left + 1) / 2;
        __syncthreads();
        if (is_active && group + half < left) {
          total.Merge(shared_states[threadIdx.x + half * lanes]);
          shared_states[threadIdx.x] = total;
        }
      }
      __syncthreads();
      total = shared_states[lane];
      __syncthreads();
      merged_key = key;
    }
    if (!is_active) return;
    const int64_t first_row = chunk * a.chunk_rows;
    const int64_t end_row = min(first_row + a.chunk_rows, a.rows.count);
    // A head from the chunk's first row on, a tail from its last one back.
    const int64_t count = end_row - first_row;
    for (int64_t i = group; i < count; i += kInFlight * groups) {
      int64_t row[kInFlight];
      bool is_member[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int64_t from_border = min(i + u * groups, count - 1);
        row[u] = is_tail ? end_row - 1 - from_border : first_row + from_border;
        is_member[u] = a.rows.Key(row[u]) == key && i + u * groups < count;
      }
      if (!is_member[0]) break;
      Vector<T, kVec> values[kInFlight];
      [[maybe_unused]] Vector<T, kVec> d_values[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        values[u] = load_row(0, row[u]);
        if constexpr (kBackward) d_values[u] = load_row(1, row[u]);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (!is_member[u]) continue;
        Vector<T, kVec> result;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const C value = static_cast<C>(values[u].lane[i]);
          if constexpr (kBackward) {
            result.lane[i] = static_cast<T>(
                SoftmaxGradient(value, static_cast<C>(d_values[u].lane[i]), total.cells[i].sum));
          } else {
            result.lane[i] = static_cast<T>(Probability(total.cells[i], value));
          }
        }
        StoreStreaming(a.output + a.rows.Place(row[u]) * a.features + column, result);
      }
    }
  };

  // The worker's pieces: every `workers`-th group of a.pieces_at_once neighbouring ones, which are mostly of one run.
  const auto piece_at = [&](int64_t i) {
    const int64_t group_of_pieces = i / a.pieces_at_once;
    return (group_of_pieces * workers + worker) * a.pieces_at_once + (i - group_of_pieces * a.pieces_at_once);
  };
  for (int64_t base = 0; piece_at(base) < 2 * a.chunks; base += kLongRunThreads) {
    const int64_t own = piece_at(base + threadIdx.x);
    const bool has_run = own < 2 * a.chunks && a.run_keys[own] != kNoRun;
    const uint32_t in_warp = __ballot_sync(kWholeWarp, has_run);
    if (threadIdx.x % 32 == 0) shared_pieces[threadIdx.x / 32] = in_warp;
    if (!__syncthreads_or(has_run)) continue;
    for (int warp = 0; warp < kLongRunThreads / 32; ++warp) {
      for (uint32_t left = shared_pieces[warp]; left != 0; left &= left - 1) {
        take_piece(piece_at(base + warp * 32 + __ffs(left) - 1));
      }
    }
    __syncthreads();
  }
}

}  // namespace jax_baracuda::segment
