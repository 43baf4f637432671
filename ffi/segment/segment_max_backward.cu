// The gradient of segment_max: each cell's cotangent goes to its winner, in one pass over the rows.
#include "ffi/segment/segment_max.cuh"
#include "ffi/segment/segment_max_device.cuh"

namespace jax_baracuda::segment {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsInFlight = 2;
constexpr int kRowsPerThread = 32;

template <typename T>
struct BackwardArguments {
  SegmentIds ids;
  Problem problem;
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

// 16 bits tie often, which costs a read of the data in the midst of the others: more threads hide it.
template <typename T>
inline constexpr int kBlocks = sizeof(T) == 2 ? 5 : 4;  // that share a multiprocessor

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) BackwardKernel(const __grid_constant__ BackwardArguments<T> a) {
  extern __shared__ uint32_t segments[];  // of the block's rows
  const int groups = kThreads / a.features.lanes;
  const int group = threadIdx.x / a.features.lanes;
  // Column blocks are the slow dimension of the grid: the winners and cotangents of one column may stay in L2 while all
  // rows gather from it.
  const int64_t row_blocks = gridDim.x / a.features.columns;
  const int64_t column_block = blockIdx.x / row_blocks;
  const int64_t row_block = blockIdx.x - column_block * row_blocks;
  const int64_t column = (column_block * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const int64_t b = row_block / a.blocks_per_batch;
  const int block_rows = groups * kRowsPerThread;
  const int64_t first_row = (row_block - b * a.blocks_per_batch) * block_rows;
  const int rows = static_cast<int>(min(a.problem.rows - first_row, static_cast<int64_t>(block_rows)));

  const int64_t ids_offset = (a.problem.ids_are_shared ? 0 : b * a.problem.rows) + first_row;
#pragma unroll 4
  for (int i = threadIdx.x; i < block_rows; i += kThreads) {
    segments[i] = i < rows ? a.ids[ids_offset + i] : kDropped;
  }
  __syncthreads();
  if (group >= groups || column >= a.problem.features) return;

  const int64_t features = a.problem.features;
  const int64_t winner_offset = (a.winner_is_shared ? 0 : b * a.problem.segments) * features + column;
  const int32_t* const winner = a.winner + winner_offset;
  const T* const d_output =
      a.d_output + (a.d_output_is_shared ? 0 : b * a.problem.segments) * features + column;
  const int64_t first_data = ((a.problem.data_is_shared ? 0 : b * a.problem.rows) + first_row) * features + column;
  T* const d_data = a.d_data + (b * a.problem.rows + first_row) * features + column;
  const T zero = static_cast<T>(ComputeType<T>{0});

  // The winners of kRowsInFlight rows; nobody where the row is dropped.
  struct Winners {
    Vector<int32_t, kVec> of[kRowsInFlight];
  };
  const auto load_winners = [&](int row) {
    Winners winners;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int own = row + u * groups;
      const uint32_t segment = own < rows ? segments[own] : kDropped;
      winners.of[u] = Repeat<kVec>(kNoWinner);
      if (segment != kDropped) winners.of[u] = LoadVector<kVec>(winner + segment * features);
    }
    return winners;
  };

  Winners next = load_winners(group);
  for (int row = group; row < rows; row += kRowsInFlight * groups) {
    const Winners winners = next;
    Vector<T, kVec> gradient[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int own = row + u * groups;
      bool is_read = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int32_t w = winners.of[u].lane[i];
        is_read |= w == static_cast<int32_t>(first_row) + own || IsTie(w);
      }
      gradient[u] = Repeat<kVec>(zero);
      if (is_read) gradient[u] = LoadVector<kVec>(d_output + segments[own] * features);
    }
    // The next winners come while these cotangents do.
    next = load_winners(row + kRowsInFlight * groups);
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int own = row + u * groups;
      if (own >= rows) break;
      Vector<T, kVec> share = gradient[u];
      bool has_tie = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int32_t w = winners.of[u].lane[i];
        if (w != static_cast<int32_t>(first_row) + own) share.lane[i] = zero;
        has_tie |= IsTie(w);
      }
      if (has_tie) {
        const Vector<T, kVec> data = LoadStreaming<T, kVec>(a.data + first_data + own * features);
        const Vector<T, kVec> output = LoadVector<kVec>(a.output + winner_offset + segments[own] * features);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const int32_t w = winners.of[u].lane[i];
          if (IsTie(w)) share.lane[i] = TiedGradient(w, data.lane[i], output.lane[i], gradient[u].lane[i]);
        }
      }
      StoreStreaming(d_data + own * features, share);
    }
  }
}

}  // namespace

cudaError_t LaunchSegmentMaxBackward(const SegmentMaxBackwardArguments& arguments, cudaStream_t stream) {
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
      a.d_output = static_cast<const T*>(arguments.d_output);
      a.winner = arguments.winner;
      a.data = static_cast<const T*>(arguments.data);
      a.output = static_cast<const T*>(arguments.output);
      a.d_data = static_cast<T*>(arguments.d_data);
      a.d_output_is_shared = arguments.d_output_is_shared;
      a.winner_is_shared = arguments.winner_is_shared;
      a.features = DealFeatures(problem.features / kVec, 32);
      a.blocks_per_batch = CeilDivide(problem.rows, kThreads / a.features.lanes * kRowsPerThread);
      const int64_t blocks = problem.batch * a.blocks_per_batch * a.features.columns;
      const size_t shared_bytes = kThreads / a.features.lanes * kRowsPerThread * sizeof(uint32_t);
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
