// The gradient of segment_max and segment_min: each cell's cotangent goes to its winner, in one pass over the rows.
#include "ffi/segment/extremum.cuh"
#include "ffi/segment/device.cuh"
#include "ffi/segment/extremum.h"

namespace jax_baracuda::segment {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsInFlight = 2;
constexpr int kMostBlockRows = 4096;  // which take 32 KB of shared memory
constexpr int32_t kNoRow = -2;  // no winner either

// Rows of a block: 32 for each group of threads, or fewer.
__host__ __device__ __forceinline__ int BlockRows(const FeatureLanes& features) {
  const int rows = kThreads / features.lanes * 32;
  return rows < kMostBlockRows ? rows : kMostBlockRows;
}

template <typename T>
struct BackwardArguments {
  SegmentIds ids;
  Problem problem;
  const int32_t* order;  // [batch or 1, rows] or nullptr
  bool order_is_shared;
  const T* d_output;
  const int32_t* winner;
  const T* data;
  const T* output;
  T* d_data;
  bool d_output_is_shared;
  bool winner_is_shared;
  FeatureLanes features;
  int64_t blocks_per_batch;  // along the rows
};

constexpr int kBlocks = 4;  // that share a multiprocessor

// TiedGradient of a row that attains the maximum. 16 bits tie often, so they divide in two instructions where the error of
// that, 2^-22, cannot matter: the quotient of a number of 11 bits and a count of 8 is further than 2^-20 from any point
// halfway between two numbers of 11 bits.
template <typename T>
__device__ __forceinline__ T Share(T d_output, int32_t members) {
  using C = ComputeType<T>;
  const C cotangent = static_cast<C>(d_output);
  if constexpr (sizeof(T) == 2) {
    if (members <= 256 && fabsf(cotangent) > 1e-30f) {
      return static_cast<T>(__fdividef(cotangent, static_cast<float>(members)));
    }
  }
  return static_cast<T>(cotangent / static_cast<C>(members));
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads, kBlocks) BackwardKernel(const __grid_constant__ BackwardArguments<T> a) {
  extern __shared__ uint32_t block_memory[];
  const int groups = kThreads / a.features.lanes;
  const int group = threadIdx.x / a.features.lanes;
  // Column blocks are the slow dimension of the grid: the winners and cotangents of one column may stay in L2 while all
  // rows gather from it.
  const int64_t row_blocks = gridDim.x / a.features.columns;
  const int64_t column_block = blockIdx.x / row_blocks;
  const int64_t row_block = blockIdx.x - column_block * row_blocks;
  const int64_t column = (column_block * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const int64_t b = row_block / a.blocks_per_batch;
  const int block_rows = BlockRows(a.features);
  const struct {
    uint32_t* segment;
    int32_t* row;
  } block{block_memory, reinterpret_cast<int32_t*>(block_memory + block_rows)};
  const int64_t first_row = (row_block - b * a.blocks_per_batch) * block_rows;
  const int rows = static_cast<int>(min(a.problem.rows - first_row, static_cast<int64_t>(block_rows)));

  // With an order, blocks take rows that are neighbours in it, of few segments: their winners and cotangents are read once.
  const int64_t first_id = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
  const int64_t first_place = (a.order_is_shared ? 0 : b * a.problem.rows) + first_row;
#pragma unroll 4
  for (int i = threadIdx.x; i < block_rows; i += kThreads) {
    int32_t row = i < rows ? static_cast<int32_t>(first_row) + i : kNoRow;
    if (a.order != nullptr && i < rows) {
      row = __ldg(a.order + first_place + i);
      if (static_cast<uint32_t>(row) >= static_cast<uint32_t>(a.problem.rows)) row = kNoRow;
    }
    block.row[i] = row;
    block.segment[i] = row == kNoRow ? kDropped : a.ids[first_id + row];
  }
  __syncthreads();
  if (group >= groups || column >= a.problem.features) return;

  const int64_t features = a.problem.features;
  const int64_t winner_offset = (a.winner_is_shared ? 0 : b * a.problem.segments) * features + column;
  const int32_t* const winner = a.winner + winner_offset;
  const T* const d_output =
      a.d_output + (a.d_output_is_shared ? 0 : b * a.problem.segments) * features + column;
  const int64_t first_data = (a.problem.data_is_shared ? 0 : b * a.problem.rows) * features + column;
  T* const d_data = a.d_data + b * a.problem.rows * features + column;
  const T zero = static_cast<T>(ComputeType<T>{0});

  // The winners of kRowsInFlight rows; nobody where the row is dropped.
  struct Winners {
    Vector<int32_t, kVec> of[kRowsInFlight];
  };
  const auto load_winners = [&](int first) {
    Winners winners;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int own = first + u * groups;
      const uint32_t segment = own < rows ? block.segment[own] : kDropped;
      winners.of[u] = Repeat<kVec>(kNoWinner);
      if (segment != kDropped) winners.of[u] = LoadVector<kVec>(winner + segment * features);
    }
    return winners;
  };

  Winners next = load_winners(group);
  for (int first = group; first < rows; first += kRowsInFlight * groups) {
    const Winners winners = next;
    Packed<T, kVec> cotangents[kRowsInFlight], data[kRowsInFlight], output[kRowsInFlight];
    int32_t row[kRowsInFlight];
    bool has_tie[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int own = first + u * groups;
      row[u] = own < rows ? block.row[own] : kNoRow;
      bool wins = false;
      has_tie[u] = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int32_t w = winners.of[u].lane[i];
        wins |= w == row[u];
        has_tie[u] |= IsTie(w);
      }
      if ((wins || has_tie[u]) && row[u] != kNoRow) {
        const int64_t segment_offset = block.segment[own] * features;
        cotangents[u] = LoadPacked<T, kVec>(d_output + segment_offset);
        if (has_tie[u]) {
          data[u] = LoadPackedStreaming<T, kVec>(a.data + first_data + row[u] * features);
          output[u] = LoadPacked<T, kVec>(a.output + winner_offset + segment_offset);
        }
      }
    }
    // The next winners come while these cotangents do.
    next = load_winners(first + kRowsInFlight * groups);
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      if (row[u] == kNoRow) continue;
      const Vector<T, kVec> cotangent = Unpack<T, kVec>(cotangents[u]);
      Vector<T, kVec> share;
#pragma unroll
      for (int i = 0; i < kVec; ++i) share.lane[i] = winners.of[u].lane[i] == row[u] ? cotangent.lane[i] : zero;
      if (has_tie[u]) {
        const Vector<T, kVec> values = Unpack<T, kVec>(data[u]), maxima = Unpack<T, kVec>(output[u]);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          using C = ComputeType<T>;
          const int32_t w = winners.of[u].lane[i];
          if (IsTie(w) && static_cast<C>(values.lane[i]) == static_cast<C>(maxima.lane[i])) {
            share.lane[i] = Share(cotangent.lane[i], -w);
          }
        }
      }
      StoreStreaming(d_data + row[u] * features, share);
    }
  }
}

}  // namespace

cudaError_t LaunchExtremumBackward(const ExtremumBackwardArguments& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  if (problem.batch == 0 || problem.rows == 0 || problem.features == 0) return cudaSuccess;
  if (!SegmentsFit(problem.segments)) return cudaErrorInvalidValue;
  cudaError_t error = cudaErrorInvalidValue;
  DispatchFloating(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    // 16 bytes of winners to a thread, so a vector is no more than 4 elements.
    constexpr int kWidest = sizeof(T) == 8 ? 2 : 4;
    const auto launch = [&](auto vector) {
      constexpr int kVec = decltype(vector)::value;
      BackwardArguments<T> a{};
      a.ids = {arguments.segment_ids, arguments.ids_are_64_bit, problem.segments};
      a.problem = problem;
      a.order = arguments.order;
      a.order_is_shared = arguments.order_is_shared;
      a.d_output = static_cast<const T*>(arguments.d_output);
      a.winner = arguments.winner;
      a.data = static_cast<const T*>(arguments.data);
      a.output = static_cast<const T*>(arguments.output);
      a.d_data = static_cast<T*>(arguments.d_data);
      a.d_output_is_shared = arguments.d_output_is_shared;
      a.winner_is_shared = arguments.winner_is_shared;
      a.features = DealFeatures(problem.features / kVec, 32);
      a.blocks_per_batch = CeilDivide(problem.rows, BlockRows(a.features));
      const int64_t blocks = problem.batch * a.blocks_per_batch * a.features.columns;
      const size_t shared_bytes = BlockRows(a.features) * (sizeof(uint32_t) + sizeof(int32_t));
      BackwardKernel<T, kVec><<<static_cast<uint32_t>(blocks), kThreads, shared_bytes, stream>>>(a);
      error = cudaGetLastError();
    };
    if (problem.features % kWidest == 0) {
      launch(std::integral_constant<int, kWidest>{});
    } else {
      launch(std::integral_constant<int, 1>{});
    }
  });
  return error;
}

}  // namespace jax_baracuda::segment
