// The CUDA kernel of write_slice and its gradient. One launch moves several windows. A thread moves a few words of one
// row, whose position it finds once.
//
// Rows that consist of whole bytes are moved in the widest words at whose multiples all of them begin and end. Other
// rows are written byte by byte.

#include <algorithm>
#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/core/integers.h"
#include "ffi/write_slice/write_slice.h"

namespace jax_baracuda::write_slice {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kWordsPerThread = 4;

// All devices support kernel arguments of 4096 bytes.
inline constexpr int kMaxUpdates = 5;

// The threads of an update: 1 << lane_bits of them move a chunk of a row, kWordsPerThread words each.
struct Tiling {
  int lane_bits;
  int64_t chunks_of_row;
};

// blockIdx.y is the number of an update.
struct Launch {
  Tiling tilings[kMaxUpdates];
  Update updates[kMaxUpdates];
};
static_assert(sizeof(Launch) <= 4096);

template <typename Word>
__device__ __forceinline__ Word* At(void* base, int64_t bits) {
  return reinterpret_cast<Word*>(static_cast<char*>(base) + (bits >> 3));
}

// Moves words `word`, `word` + lanes, ... of a row.
template <typename Word, bool kTake>
__device__ __forceinline__ void MoveWords(const Update& update, int64_t row_number, int64_t word, int lanes) {
  constexpr int64_t kBits = 8 * sizeof(Word);
  Word* const source = At<Word>(update.source, SourceRow(update, row_number)) + word;
  Word written[kWordsPerThread] = {};
  if constexpr (!kTake) {
    // These loads come first because they need not wait for the starts, as LocateRow does.
    const int64_t remaining = update.row_bits / kBits - word;
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i) {
      if (i * lanes < remaining) written[i] = source[i * lanes];
    }
  }
  const Row row = LocateRow(update, row_number);
  Word* const dest = At<Word>(update.dest, row.begin) + word;
  const int64_t first = row.first / kBits - word, last = row.last / kBits - word;
  const auto is_inside = [&](int i) { return first <= i * lanes && i * lanes < last; };
  if constexpr (kTake) {
    // A store into a line that is being loaded is slow. The stores to `source` wait for the loads, so they come first.
    Word taken[kWordsPerThread];
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i) {
      if (is_inside(i)) taken[i] = dest[i * lanes];
    }
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i) {
      if (is_inside(i)) source[i * lanes] = taken[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWordsPerThread; ++i) {
    if (is_inside(i)) dest[i * lanes] = written[i];
  }
}

template <bool kTake>
__global__ void __launch_bounds__(kThreads) MoveWindows(const __grid_constant__ Launch launch) {
  const Update& update = launch.updates[blockIdx.y];
  const Tiling& tiling = launch.tilings[blockIdx.y];
  const int lanes = 1 << tiling.lane_bits, lane = threadIdx.x & (lanes - 1);
  const int64_t group = (int64_t{blockIdx.x} * kThreads + threadIdx.x) >> tiling.lane_bits;
  const auto [row_number, chunk] = Divide(group, tiling.chunks_of_row);
  if (row_number >= update.num_rows) return;
  const int64_t word = chunk * lanes * kWordsPerThread + lane;
  if (!kTake && update.word == 0) {
    const Row row = LocateRow(update, row_number);
#pragma unroll 1
    for (int i = 0; i < kWordsPerThread; ++i) WriteByteOfRow(update, row_number, row, word + i * lanes);
    return;
  }
  switch (update.word) {
    case 1:
      return MoveWords<uint8_t, kTake>(update, row_number, word, lanes);
    case 2:
      return MoveWords<uint16_t, kTake>(update, row_number, word, lanes);
    case 4:
      return MoveWords<uint32_t, kTake>(update, row_number, word, lanes);
    case 8:
      return MoveWords<uint2, kTake>(update, row_number, word, lanes);
    default:
      return MoveWords<uint4, kTake>(update, row_number, word, lanes);
  }
}

template <bool kTake>
CudaStatus LaunchMoves(const Call& call, cudaStream_t stream) {
  for (const Copy& copy : call.copies) JB_RETURN_IF_CUDA_ERROR(LaunchCopy(copy, stream));
  for (const Update& update : call.updates) {
    if (!kTake || !update.may_be_outside) continue;
    const size_t source_bytes = static_cast<size_t>(update.source_rows * update.row_bits / 8);
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(update.source, 0, source_bytes, stream));
  }
  const int count = static_cast<int>(call.updates.size());
  for (int first = 0; first < count; first += kMaxUpdates) {
    const int updates_of_launch = std::min(count - first, kMaxUpdates);
    Launch launch;
    int64_t most_blocks = 0;
    for (int i = 0; i < updates_of_launch; ++i) {
      const Update& update = launch.updates[i] = call.updates[first + i];
      const int64_t words_of_row = CeilDivide(update.MaxBytesOfRow(), std::max(update.word, 1));
      int lane_bits = 0;
      while (1 << lane_bits < kThreads && kWordsPerThread << lane_bits < words_of_row) ++lane_bits;
      const int64_t chunks_of_row = CeilDivide(words_of_row, int64_t{kWordsPerThread} << lane_bits);
      launch.tilings[i] = {lane_bits, chunks_of_row};
      most_blocks = std::max(most_blocks, CeilDivide(update.num_rows * chunks_of_row, kThreads >> lane_bits));
    }
    const dim3 blocks(GridSize(most_blocks), updates_of_launch);
    MoveWindows<kTake><<<blocks, kThreads, 0, stream>>>(launch);
    JB_RETURN_IF_LAUNCH_ERROR(MoveWindows);
  }
  return {};
}

}  // namespace

CudaStatus Call::Write(cudaStream_t stream) const { return LaunchMoves</*kTake=*/false>(*this, stream); }

CudaStatus Call::Take(cudaStream_t stream) const { return LaunchMoves</*kTake=*/true>(*this, stream); }

}  // namespace jax_baracuda::write_slice
