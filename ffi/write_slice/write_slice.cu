// The CUDA kernel of write_slice and its gradient. One launch moves several windows. A thread moves a few words of one
// row, whose position it finds once.
//
// Rows that consist of whole bytes are moved in the widest words at whose multiples all of them begin and end. Other
// rows are written in aligned words of the array. So every byte of an array belongs to one thread.

#include <algorithm>
#include <cstdint>

#include "ffi/core/integers.h"
#include "ffi/write_slice/write_slice.cuh"

namespace jax_baracuda::write_slice {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kWordsPerThread = 4;

// All devices support kernel arguments of 4096 bytes.
inline constexpr int kMaxUpdates = 5;

// The threads of an update. 1 << lane_bits of them move a chunk of a row, kWordsPerThread words each.
struct Tiling {
  int lane_bits;
  unsigned first_block;
  int64_t chunks_of_row;
};

struct Launch {
  int count;
  Tiling tilings[kMaxUpdates];
  Update updates[kMaxUpdates];
};
static_assert(sizeof(Launch) <= 4096);

template <typename T>
__device__ __forceinline__ T* At(void* base, int64_t bytes) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + bytes);
}

// Moves words `word`, `word` + lanes, ... of a row.
template <typename Word, bool kTake>
__device__ __forceinline__ void MoveWords(const Update& update, int64_t row_number, int64_t word, int lanes) {
  constexpr int64_t kBytes = sizeof(Word);
  Word* const source = At<Word>(update.source, SourceRow(update, row_number)) + word;
  Word written[kWordsPerThread] = {};
  if constexpr (!kTake) {
    // These loads come first because they need not wait for the starts, as LocateRow does.
    const int64_t remaining = update.run_units / kBytes - word;
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i) {
      if (i * lanes < remaining) written[i] = source[i * lanes];
    }
  }
  const Row row = LocateRow(update, row_number);
  Word* const dest = At<Word>(update.dest, row.begin) + word;
  const int64_t first = row.first / kBytes - word, last = row.last / kBytes - word;
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

using WordOfBits = uint64_t;
inline constexpr int64_t kBytesOfWord = sizeof(WordOfBits);

// Writes aligned word number `word` of those that the row touches. Bytes at the ends of the row may also have elements
// of other rows.
__device__ __forceinline__ void WriteWordOfBits(const Update& update, int64_t row_number, const Row& row,
                                                int64_t word) {
  const int shift = update.bit_width == 4 ? 1 : 2;  // 2 or 4 elements in a byte
  const int64_t row_begin = (row.begin + row.first) >> shift, row_end = ((row.begin + row.last - 1) >> shift) + 1;
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(update.dest) % kBytesOfWord);
  const int64_t begin = (row_begin + misaligned) / kBytesOfWord * kBytesOfWord - misaligned + word * kBytesOfWord;
  const int64_t end = begin + kBytesOfWord;
  if (begin <= row_begin || end >= row_end) {
    const int64_t last_byte = min(end, row_end);
#pragma unroll 1
    for (int64_t byte = max(begin, row_begin); byte < last_byte; ++byte) {
      WriteByteOnce(update, row_number, row, byte - row_begin);
    }
    return;
  }
  const int64_t bit = (SourceRow(update, row_number) + (begin << shift) - row.begin) * update.bit_width;
  const uint8_t* const source = At<const uint8_t>(update.source, bit >> 3);
  const int skipped_bits = static_cast<int>(bit & 7);
  WordOfBits written = 0;
#pragma unroll
  for (int i = 0; i < kBytesOfWord; ++i) written |= WordOfBits{source[i]} << (8 * i);
  if (skipped_bits != 0) {
    written = written >> skipped_bits | WordOfBits{source[kBytesOfWord]} << (8 * kBytesOfWord - skipped_bits);
  }
  *At<WordOfBits>(update.dest, begin) = written;
}

__device__ __forceinline__ void WriteWordsOfBits(const Update& update, int64_t row_number, int64_t word, int lanes) {
  const Row row = LocateRow(update, row_number);
  if (row.first >= row.last) return;
#pragma unroll 1
  for (int i = 0; i < kWordsPerThread; ++i) WriteWordOfBits(update, row_number, row, word + i * lanes);
}

template <bool kTake>
__global__ void __launch_bounds__(kThreads) MoveWindows(const __grid_constant__ Launch launch) {
  int i = 0;
  while (i + 1 < launch.count && blockIdx.x >= launch.tilings[i + 1].first_block) ++i;
  const Update& update = launch.updates[i];
  const Tiling& tiling = launch.tilings[i];
  const int lanes = 1 << tiling.lane_bits, lane = threadIdx.x & (lanes - 1);
  const int64_t group = (int64_t{blockIdx.x - tiling.first_block} * kThreads + threadIdx.x) >> tiling.lane_bits;
  const auto [row, chunk] = Divide(group, tiling.chunks_of_row);
  if (row >= update.num_rows) return;
  const int64_t word = chunk * lanes * kWordsPerThread + lane;
  if constexpr (!kTake) {
    if (update.has_bits) return WriteWordsOfBits(update, row, word, lanes);
  }
  switch (update.word) {
    case 1:
      return MoveWords<uint8_t, kTake>(update, row, word, lanes);
    case 2:
      return MoveWords<uint16_t, kTake>(update, row, word, lanes);
    case 4:
      return MoveWords<uint32_t, kTake>(update, row, word, lanes);
    case 8:
      return MoveWords<uint2, kTake>(update, row, word, lanes);
    default:
      return MoveWords<uint4, kTake>(update, row, word, lanes);
  }
}

// A row of bits touches the most words if it begins in the last byte of one.
int64_t WordsOfRow(const Update& update) {
  return update.has_bits ? CeilDivide(MaxBytesOfRow(update) + kBytesOfWord - 1, kBytesOfWord)
                         : update.run_units / update.word;
}

int LaneBits(int64_t words_of_row) {
  int bits = 0;
  while (1 << bits < kThreads && kWordsPerThread << bits < words_of_row) ++bits;
  return bits;
}

template <bool kTake>
CudaStatus LaunchMoves(const std::vector<Update>& updates, cudaStream_t stream) {
  const int count = static_cast<int>(updates.size());
  for (int first = 0; first < count; first += kMaxUpdates) {
    Launch launch;
    launch.count = std::min(count - first, kMaxUpdates);
    int64_t num_blocks = 0;
    for (int i = 0; i < launch.count; ++i) {
      const Update& update = launch.updates[i] = updates[first + i];
      const int64_t words_of_row = WordsOfRow(update);
      const int lane_bits = LaneBits(words_of_row);
      const int64_t chunks_of_row = CeilDivide(words_of_row, int64_t{kWordsPerThread} << lane_bits);
      launch.tilings[i] = {lane_bits, static_cast<unsigned>(num_blocks), chunks_of_row};
      num_blocks += CeilDivide(update.num_rows * chunks_of_row, int64_t{kThreads >> lane_bits});
    }
    MoveWindows<kTake><<<GridSize(num_blocks), kThreads, 0, stream>>>(launch);
    JB_RETURN_IF_LAUNCH_ERROR(MoveWindows);
  }
  return {};
}

}  // namespace

CudaStatus LaunchWrite(const std::vector<Update>& updates, cudaStream_t stream) {
  return LaunchMoves</*kTake=*/false>(updates, stream);
}

CudaStatus LaunchTake(const std::vector<Update>& updates, cudaStream_t stream) {
  for (const Update& update : updates) {
    if (!update.may_be_outside) continue;
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(update.source, 0, static_cast<size_t>(update.source_bytes), stream));
  }
  return LaunchMoves</*kTake=*/true>(updates, stream);
}

}  // namespace jax_baracuda::write_slice
