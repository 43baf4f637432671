// The CUDA kernel of write_slice and its gradient. One launch moves several windows, one word per thread.
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

// All devices support kernel arguments of 4096 bytes.
inline constexpr int kMaxUpdates = 5;

struct Launch {
  int count;
  int64_t words_of_row[kMaxUpdates];
  unsigned first_block[kMaxUpdates];
  Update updates[kMaxUpdates];
};
static_assert(sizeof(Launch) <= 4096);

template <typename T>
__device__ __forceinline__ T* At(void* base, int64_t bytes) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + bytes);
}

template <typename Word, bool kTake>
__device__ __forceinline__ void MoveWord(const Update& update, int64_t row_number, int64_t word) {
  constexpr int64_t kBytes = sizeof(Word);
  Word* const source = At<Word>(update.source, SourceRow(update, row_number)) + word;
  Word written{};
  // This load comes first because it need not wait for the starts, as LocateRow does.
  if constexpr (!kTake) written = *source;
  const Row row = LocateRow(update, row_number);
  if (word < row.first / kBytes || word >= row.last / kBytes) return;
  Word* const dest = At<Word>(update.dest, row.begin) + word;
  // A store into a line that is being loaded is slow. The store to `source` waits for the load, so it comes first.
  if constexpr (kTake) *source = *dest;
  *dest = written;
}

using WordOfBits = uint64_t;
inline constexpr int64_t kBytesOfWord = sizeof(WordOfBits);

// Writes aligned word number `word` of those that the row touches. Bytes at the ends of the row may also have elements
// of other rows.
__device__ __forceinline__ void WriteWordOfBits(const Update& update, int64_t row_number, int64_t word) {
  const Row row = LocateRow(update, row_number);
  if (row.first >= row.last) return;
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

template <bool kTake>
__global__ void __launch_bounds__(kThreads) MoveWindows(const __grid_constant__ Launch launch) {
  int i = 0;
  while (i + 1 < launch.count && blockIdx.x >= launch.first_block[i + 1]) ++i;
  const Update& update = launch.updates[i];
  const int64_t number = int64_t{blockIdx.x - launch.first_block[i]} * kThreads + threadIdx.x;
  const auto [row, word] = Divide(number, launch.words_of_row[i]);
  if (row >= update.num_rows) return;
  if constexpr (!kTake) {
    if (update.has_bits) return WriteWordOfBits(update, row, word);
  }
  switch (update.word) {
    case 1:
      return MoveWord<uint8_t, kTake>(update, row, word);
    case 2:
      return MoveWord<uint16_t, kTake>(update, row, word);
    case 4:
      return MoveWord<uint32_t, kTake>(update, row, word);
    case 8:
      return MoveWord<uint2, kTake>(update, row, word);
    default:
      return MoveWord<uint4, kTake>(update, row, word);
  }
}

// A row of bits touches the most words if it begins in the last byte of one.
int64_t WordsOfRow(const Update& update) {
  return update.has_bits ? CeilDivide(MaxBytesOfRow(update) + kBytesOfWord - 1, kBytesOfWord)
                         : update.run_units / update.word;
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
      launch.words_of_row[i] = WordsOfRow(update);
      launch.first_block[i] = static_cast<unsigned>(num_blocks);
      num_blocks += CeilDivide(update.num_rows * launch.words_of_row[i], kThreads);
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
