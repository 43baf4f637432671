// The gradient of segment_max: each cell's cotangent goes to its winner, in one pass over the rows.
#include "ffi/segment/segment_max.cuh"
#include "ffi/segment/segment_max_device.cuh"

namespace jax_baracuda::segment {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 4;

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

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) BackwardKernel(const __grid_constant__ BackwardArguments<T> a) {
  const int groups = kThreads / a.features.lanes;
  const int group = threadIdx.x / a.features.lanes;
  // Column blocks are the slow dimension of the grid: the winners and cotangents of one column may stay in L2 while all
  // rows gather from it.
  const int64_t row_blocks = gridDim.x / a.features.columns;
  const int64_t column_block = blockIdx.x / row_blocks;
  const int64_t row_block = blockIdx.x - column_block * row_blocks;
  const int64_t column = (column_block * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const int64_t b = row_block / a.blocks_per_batch;
  const int64_t first_row = (row_block - b * a.blocks_per_batch) * groups * kRowsPerThread + group;
  if (group >= groups || column >= a.problem.features) return;

  const int64_t features = a.problem.features;
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
  const int64_t data_offset = a.problem.data_is_shared ? 0 : b * a.problem.rows;
  const int64_t winner_offset = a.winner_is_shared ? 0 : b * a.problem.segments;
  const int64_t d_output_offset = a.d_output_is_shared ? 0 : b * a.problem.segments;

  uint32_t segment[kRowsPerThread];
  Vector<int32_t, kVec> winner[kRowsPerThread];
  Vector<T, kVec> d_output[kRowsPerThread];
  bool is_read[kRowsPerThread];
#pragma unroll
  for (int u = 0; u < kRowsPerThread; ++u) {
    const int64_t row = first_row + u * groups;
    segment[u] = row < a.problem.rows ? a.ids[ids_offset + row] : kDropped;
  }
#pragma unroll
  for (int u = 0; u < kRowsPerThread; ++u) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) winner[u].lane[i] = kNoWinner;
    if (segment[u] != kDropped) {
      winner[u] = LoadVector<kVec>(a.winner + (winner_offset + segment[u]) * features + column);
    }
  }
#pragma unroll
  for (int u = 0; u < kRowsPerThread; ++u) {
    const int32_t row = static_cast<int32_t>(first_row + u * groups);
    is_read[u] = false;
#pragma unroll
    for (int i = 0; i < kVec; ++i) is_read[u] |= winner[u].lane[i] == row || IsTie(winner[u].lane[i]);
    if (is_read[u]) {
      d_output[u] = LoadVector<kVec>(a.d_output + (d_output_offset + segment[u]) * features + column);
    }
  }
#pragma unroll
  for (int u = 0; u < kRowsPerThread; ++u) {
    const int64_t row = first_row + u * groups;
    Vector<T, kVec> d_data;
    bool has_tie = false;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const bool wins = winner[u].lane[i] == static_cast<int32_t>(row);
      d_data.lane[i] = wins ? d_output[u].lane[i] : static_cast<T>(ComputeType<T>{0});
      has_tie |= IsTie(winner[u].lane[i]);
    }
    if (has_tie) {
      const Vector<T, kVec> data = LoadStreaming<T, kVec>(a.data + (data_offset + row) * features + column);
      const Vector<T, kVec> output =
          LoadVector<kVec>(a.output + (winner_offset + segment[u]) * features + column);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (!IsTie(winner[u].lane[i])) continue;
        d_data.lane[i] = TiedGradient(winner[u].lane[i], data.lane[i], output.lane[i], d_output[u].lane[i]);
      }
    }
    if (row < a.problem.rows) {
      StoreStreaming(a.d_data + (b * a.problem.rows + row) * features + column, d_data);
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
      BackwardKernel<T, kVec><<<static_cast<uint32_t>(blocks), kThreads, 0, stream>>>(a);
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
