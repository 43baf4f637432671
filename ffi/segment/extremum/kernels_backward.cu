// The gradient of segment_max and segment_min: each cell's cotangent goes to its winner, in one pass over the rows.
#include <type_traits>

#include "ffi/core/cuda_status.h"
#include "ffi/core/warp.cuh"
#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/extremum/arithmetic.h"
#include "ffi/segment/extremum/call.h"

namespace jax_baracuda::segment {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsInFlight = 2;
constexpr int kMaxBlockRows = 4096;  // 32 KB of shared memory
constexpr int32_t kNoRow = -2;       // differs from kNoWinner

// Rows per block: 32 per group of threads, up to kMaxBlockRows.
__host__ __device__ __forceinline__ int BlockRows(const FeatureLanes& features) {
  const int rows = kThreads / features.lanes * 32;
  return rows < kMaxBlockRows ? rows : kMaxBlockRows;
}

template <typename T>
struct BackwardArguments {
  SegmentIds ids;
  Problem problem;
  const int32_t* order;  // [batch or 1, rows] or nullptr
  bool order_is_shared;
  unsigned long long* order_error;  // 0 if the orders of all batch elements are permutations; nullptr without one
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

constexpr int kBlocks = 4;  // minimum resident blocks per multiprocessor

// For normal numbers with a normal reciprocal.
__device__ __forceinline__ float ApproximateReciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// Gradients of 16-bit types with shared ties: every element that attains the maximum gets an equal fraction of the
// cotangent. A product with an approximate reciprocal (error 2^-22) rounds like a division: the quotient of an 11-bit
// number and an 8-bit count is more than 2^-20 away from any midpoint of two neighbouring normal 11-bit numbers. It can
// be the midpoint of two subnormal numbers, so subnormal results are computed by division.
template <typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> NarrowShares(const Vector<int32_t, kVec>& winners,
                                                        const Vector<T, kVec>& cotangent, const Vector<T, kVec>& data,
                                                        const Vector<T, kVec>& output) {
  constexpr int32_t kMaxMembers = 256;
  constexpr float kSmallestNormal = std::is_same_v<T, Float16> ? 0x1p-14f : 0x1p-126f;
  const Vector<float, kVec> cotangents = Widen(cotangent), values = Widen(data), maxima = Widen(output);
  Vector<T, kVec> shares;
  int32_t min_minus_members = -1;
  bool is_subnormal = false;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const int32_t minus_members = min(winners.lane[i], -1);
    min_minus_members = min(min_minus_members, minus_members);
    const bool attains = values.lane[i] == maxima.lane[i];
    const float share = attains ? cotangents.lane[i] * -ApproximateReciprocal(minus_members) : 0.0f;
    is_subnormal |= share != 0.0f && fabsf(share) < 2 * kSmallestNormal;
    shares.lane[i] = static_cast<T>(share);
  }
  if (min_minus_members < -kMaxMembers || is_subnormal) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      shares.lane[i] = TiedGradient(min(winners.lane[i], -1), data.lane[i], output.lane[i], cotangent.lane[i]);
    }
  }
  return shares;
}

// A hash of a row. Two sets of rows have equal sums of hashes only if they are equal, except by chance.
__device__ __forceinline__ unsigned long long Hash(int32_t row) {
  unsigned long long bits = (static_cast<uint32_t>(row) + 1ull) * 0x9e3779b97f4a7c15ull;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
  return bits ^ (bits >> 27);
}

// With an order, writes the rows that it names and adds to `order_error`, which stays 0 if the order is a permutation.
// Without one, writes all rows, or returns at once if `order_error` exists and is 0. So a permutation (as from
// LaunchRowOrder and LaunchNaturalOrder) writes each row once, and any other order still gives correct rows. With
// `kReadsData`, every row is compared with the maxima; otherwise only rows that may attain a tied maximum.
template <typename T, int kVec, bool kReadsData>
__global__ void __launch_bounds__(kThreads, kBlocks) BackwardKernel(const __grid_constant__ BackwardArguments<T> a) {
  extern __shared__ uint32_t block_memory[];
  const int groups = kThreads / a.features.lanes;
  const int group = threadIdx.x / a.features.lanes;
  // Column blocks are the slow dimension of the grid, so that the winners and cotangents of one column can stay in L2
  // while all rows gather from it.
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
  if (a.order == nullptr && a.order_error != nullptr && *a.order_error == 0) return;
  const int64_t first_row = (row_block - b * a.blocks_per_batch) * block_rows;
  const int rows = static_cast<int>(min(a.problem.rows - first_row, static_cast<int64_t>(block_rows)));

  // With an order, the rows of a block are neighbours in it and belong to few segments, so their winners and cotangents
  // are read once.
  const int64_t first_id = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
  const int64_t first_place = (a.order_is_shared ? 0 : b * a.problem.rows) + first_row;
  unsigned long long order_error = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < block_rows; i += kThreads) {
    int32_t row = i < rows ? static_cast<int32_t>(first_row) + i : kNoRow;
    if (a.order != nullptr && i < rows) {
      order_error -= Hash(row);
      row = __ldg(a.order + first_place + i);
      order_error += Hash(row);
      if (static_cast<uint32_t>(row) >= static_cast<uint32_t>(a.problem.rows)) row = kNoRow;
    }
    block.row[i] = row;
    block.segment[i] = row == kNoRow ? kDropped : a.ids[first_id + row];
  }
  if (a.order != nullptr && column_block == 0) {
    for (int step = 16; step > 0; step /= 2) order_error += __shfl_xor_sync(kFullWarp, order_error, step);
    if (threadIdx.x % 32 == 0 && order_error != 0) atomicAdd(a.order_error, order_error);
  }
  __syncthreads();
  if (group >= groups || column >= a.problem.features) return;

  const int64_t features = a.problem.features;
  const int64_t winner_offset = (a.winner_is_shared ? 0 : b * a.problem.segments) * features + column;
  const int32_t* const winner = a.winner + winner_offset;
  const T* const d_output = a.d_output + (a.d_output_is_shared ? 0 : b * a.problem.segments) * features + column;
  const int64_t first_data = (a.problem.data_is_shared ? 0 : b * a.problem.rows) * features + column;
  T* const d_data = a.d_data + b * a.problem.rows * features + column;
  const T zero = static_cast<T>(ComputeType<T>{0});

  // The winners of kRowsInFlight rows; kNoWinner for dropped rows.
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

  if constexpr (kReadsData) {
    const T* const output = a.output + winner_offset;
    for (int first = group; first < rows; first += kRowsInFlight * groups) {
      Packed<T, kVec> cotangents[kRowsInFlight], data[kRowsInFlight], maxima[kRowsInFlight];
      int32_t row[kRowsInFlight];
      uint32_t segment[kRowsInFlight];
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u) {
        const int own = first + u * groups;
        row[u] = own < rows ? block.row[own] : kNoRow;
        segment[u] = own < rows ? block.segment[own] : kDropped;
        if (segment[u] == kDropped) continue;
        data[u] = LoadPackedStreaming<kVec>(a.data + first_data + row[u] * features);
        maxima[u] = LoadPacked<kVec>(output + segment[u] * features);
        cotangents[u] = LoadPacked<kVec>(d_output + segment[u] * features);
      }
      const Winners winners = load_winners(first);
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u) {
        if (row[u] == kNoRow) continue;
        Vector<T, kVec> shares = Repeat<kVec>(zero);
        if (segment[u] != kDropped) {
          shares = NarrowShares(winners.of[u], Unpack<T, kVec>(cotangents[u]), Unpack<T, kVec>(data[u]),
                                Unpack<T, kVec>(maxima[u]));
        }
        StoreStreaming(d_data + row[u] * features, shares);
      }
    }
    return;
  }

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
        has_tie[u] |= IsTie(w) && a.data != nullptr;
      }
      if ((wins || has_tie[u]) && row[u] != kNoRow) {
        const int64_t segment_offset = block.segment[own] * features;
        cotangents[u] = LoadPacked<kVec>(d_output + segment_offset);
        if (has_tie[u]) {
          data[u] = LoadPackedStreaming<kVec>(a.data + first_data + row[u] * features);
          output[u] = LoadPacked<kVec>(a.output + winner_offset + segment_offset);
        }
      }
    }
    // Overlaps the loads of the next winners with those of these cotangents.
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
          const int32_t w = winners.of[u].lane[i];
          if (IsTie(w)) share.lane[i] = TiedGradient(w, values.lane[i], maxima.lane[i], cotangent.lane[i]);
        }
      }
      StoreStreaming(d_data + row[u] * features, share);
    }
  }
}

// 16-bit values tie so often that nearly every warp has to read data. Without data, ties are not shared.
bool ReadsAllRows(int64_t element_bytes, bool shares_ties) { return element_bytes == 2 && shares_ties; }

}  // namespace

Plan ExtremumBackwardCall::CudaPlan() const {
  if (problem.batch == 0 || problem.rows == 0 || problem.features == 0) return {kNothing};
  const bool reads_all = ReadsAllRows(ElementBytes(type), shares_ties);
  const char* const strategy = reads_all     ? has_order ? "all_rows_in_order" : "all_rows"
                               : shares_ties ? has_order ? "winners_and_ties_in_order" : "winners_and_ties"
                               : has_order   ? "winners_in_order"
                                             : "winners";
  return {strategy, has_order ? static_cast<int64_t>(sizeof(unsigned long long)) : 0};
}

CudaStatus ExtremumBackwardCall::LaunchOnCuda(cudaStream_t stream) const {
  if (problem.batch == 0 || problem.rows == 0 || problem.features == 0) return {};
  if (!SegmentsFit(problem.segments) || scratch_bytes < CudaPlan().scratch_bytes) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto vector, auto reads_data) {
      constexpr int kVec = decltype(vector)::value;
      BackwardArguments<T> a{};
      a.ids = {segment_ids, ids_are_64_bit, problem.segments};
      a.problem = problem;
      a.order = order;
      a.order_is_shared = order_is_shared;
      a.d_output = static_cast<const T*>(d_output);
      a.winner = winner;
      a.data = static_cast<const T*>(data);
      a.output = static_cast<const T*>(output);
      a.d_data = static_cast<T*>(d_data);
      a.d_output_is_shared = d_output_is_shared;
      a.winner_is_shared = winner_is_shared;
      a.features = AssignFeatures(problem.features / kVec, 32);
      a.blocks_per_batch = CeilDivide(problem.rows, BlockRows(a.features));
      const int64_t blocks = problem.batch * a.blocks_per_batch * a.features.columns;
      const size_t shared_bytes = BlockRows(a.features) * (sizeof(uint32_t) + sizeof(int32_t));
      const auto kernel = BackwardKernel<T, kVec, decltype(reads_data)::value>;
      if (a.order != nullptr) {
        a.order_error = static_cast<unsigned long long*>(scratch);
        status = JB_CUDA_STATUS(cudaMemsetAsync(a.order_error, 0, sizeof(*a.order_error), stream));
        if (!status.ok()) return;
        kernel<<<GridSize(blocks), kThreads, shared_bytes, stream>>>(a);
        status = JB_LAUNCH_STATUS(BackwardKernel);
        if (!status.ok()) return;
        a.order = nullptr;
      }
      kernel<<<GridSize(blocks), kThreads, shared_bytes, stream>>>(a);
      status = JB_LAUNCH_STATUS(BackwardKernel);
    };
    const auto launch_widest = [&](auto reads_data) {
      // 16 bytes of winners per thread, or of data if it is always read.
      constexpr int kWidest = sizeof(T) == 8 ? 2 : 4, kWidestOfData = 16 / sizeof(T);
      if constexpr (decltype(reads_data)::value) {
        if (problem.features % kWidestOfData == 0) {
          return launch(std::integral_constant<int, kWidestOfData>{}, reads_data);
        }
      }
      if (problem.features % kWidest == 0) {
        launch(std::integral_constant<int, kWidest>{}, reads_data);
      } else {
        launch(std::integral_constant<int, 1>{}, reads_data);
      }
    };
    if constexpr (sizeof(T) == 2) {
      if (ReadsAllRows(sizeof(T), shares_ties)) return launch_widest(std::true_type{});
    }
    launch_widest(std::false_type{});
  });
  return status;
}

}  // namespace jax_baracuda::segment
