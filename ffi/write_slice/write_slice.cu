// The CUDA kernels of write_slice and its gradient. One launch moves several windows.
//
// Rows that begin and end at multiples of 16 bytes in both arrays are moved in words of 16 bytes. Other rows are
// written as aligned vectors of the array, clipped to the row, and taken out in smaller words. So every byte of an
// array belongs to one thread.

#include <algorithm>
#include <cstdint>

#include "ffi/core/alignment.h"
#include "ffi/core/integers.h"
#include "ffi/write_slice/small_windows.cuh"
#include "ffi/write_slice/tuning.h"
#include "ffi/write_slice/write_slice.cuh"

namespace jax_baracuda::write_slice {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kItems = Tuning::kItemsOfThread;
inline constexpr int kItemsOfBlock = kThreads * kItems;

// The assignment of a window to blocks.
struct Tiling {
  int64_t items_of_row;  // items are words, or vectors of the array
  int64_t num_items;
  int64_t blocks_of_row;  // 0: items are numbered through all rows, one per thread
  unsigned first_block;
};

template <int kMaxUpdates>
struct Launch {
  int count;
  Tiling tilings[kMaxUpdates];
  Update updates[kMaxUpdates];
};

// All devices support kernel arguments of 4096 bytes.
inline constexpr int kMaxUpdatesOfLaunch = 5;
static_assert(sizeof(Launch<kMaxUpdatesOfLaunch>) <= 4096);

template <typename T>
__device__ __forceinline__ T* At(void* base, int64_t bytes) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + bytes);
}

// Whether a window is moved in words rather than in vectors of the array.
__host__ __device__ __forceinline__ bool HasWords(const Update& update, bool takes) {
  return takes || (!update.has_bits && update.word == kVectorBytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Words.

// Moves up to kCount words of a row, kThreads apart.
template <typename Word, int kCount, bool kTake>
__device__ __forceinline__ void MoveWords(const Update& update, const Tiling& tiling, int64_t number, int64_t first) {
  constexpr int64_t kBytes = sizeof(Word);
  Word* const source = At<Word>(update.source, SourceRow(update, number));
  Word words[kCount];
  if constexpr (!kTake) {
    // Issue these loads before LocateRow, which waits for the starts.
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (first + k * kThreads < tiling.items_of_row) words[k] = source[first + k * kThreads];
    }
  }
  const Row row = LocateRow(update, number);
  const int64_t begin = row.first / kBytes, end = row.last / kBytes;
  Word* const dest = At<Word>(update.dest, row.begin);
  if constexpr (kTake) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (begin <= first + k * kThreads && first + k * kThreads < end) words[k] = dest[first + k * kThreads];
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int64_t word = first + k * kThreads;
    if (word < begin || word >= end) continue;
    if constexpr (kTake) {
      // Store to `source` first, because it waits for the load: a store into a line that is still being loaded is slow.
      source[word] = words[k];
      dest[word] = Word{};
    } else {
      dest[word] = words[k];
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Vectors of the array, written from any source address or bit.

// An aligned word of the window's content. Bytes outside the content are not read.
__device__ __forceinline__ uint32_t LoadWord(const Update& update, uintptr_t address) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(update.source), end = begin + update.source_bytes;
  if (begin <= address && address + 4 <= end) return *reinterpret_cast<const uint32_t*>(address);
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const uintptr_t byte = address + i;
    if (begin <= byte && byte < end) word |= uint32_t{*reinterpret_cast<const uint8_t*>(byte)} << (8 * i);
  }
  return word;
}

// Writes bytes [first, last) of the aligned vector at `dest`. Their content begins at bit `source_bit` of the source.
__device__ __forceinline__ void WriteBytesOfVector(const Update& update, char* dest, int first, int last,
                                                   int64_t source_bit) {
  const int64_t bit = static_cast<int64_t>(reinterpret_cast<uintptr_t>(update.source)) * 8 + source_bit - first * 8;
  const bool is_whole = last - first == kVectorBytes;
  if (is_whole && bit % 128 == 0) {
    *reinterpret_cast<uint4*>(dest) = *reinterpret_cast<const uint4*>(bit >> 3);
    return;
  }
  uint32_t words[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    // Word i begins at this bit. A partial vector does not need all words.
    const int64_t word_bit = (bit & ~int64_t{31}) + 32 * i;
    const bool is_needed = word_bit + 32 > bit + first * 8 && word_bit < bit + last * 8;
    words[i] = is_needed ? LoadWord(update, static_cast<uintptr_t>(word_bit >> 3)) : 0;
  }
  const unsigned shift = static_cast<unsigned>(bit & 31);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], shift);
  if (is_whole) {
    *reinterpret_cast<uint4*>(dest) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first <= 4 * i && 4 * i + 4 <= last) {
      reinterpret_cast<uint32_t*>(dest)[i] = words[i];
      continue;
    }
#pragma unroll
    for (int j = 4 * i; j < 4 * i + 4; ++j) {
      if (first <= j && j < last) dest[j] = static_cast<char>(words[i] >> (8 * (j % 4)));
    }
  }
}

// Writes vector number `item` of the array's vectors that the row touches.
__device__ __forceinline__ void WriteVectorOfArray(const Update& update, const Row& row, int64_t number, int64_t item) {
  if (row.first >= row.last) return;
  // The bytes of the array that the row touches; the first and the last may be partial.
  const bool has_bits = update.has_bits;
  const int shift = !has_bits ? 0 : update.bit_width == 4 ? 1 : 2;
  const int64_t first_unit = row.begin + row.first, last_unit = row.begin + row.last;
  const int64_t row_begin = first_unit >> shift, row_end = (last_unit + (1 << shift) - 1) >> shift;
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(update.dest) % kVectorBytes);
  const int64_t vector = ((row_begin + misaligned) & ~(kVectorBytes - 1)) - misaligned + item * kVectorBytes;
  int64_t begin = max(vector, row_begin), end = min(vector + kVectorBytes, row_end);
  if (begin >= end) return;
  if (has_bits) {
    const bool has_first = begin == row_begin, has_last = end == row_end && end > begin + has_first;
#pragma unroll 1
    for (int i = has_first ? 0 : 1; i < 1 + has_last; ++i) {
      WriteByteOnce(update, number, row, i == 0 ? 0 : row_end - 1 - row_begin);
    }
    begin += has_first;
    end -= has_last;
    if (begin >= end) return;
  }
  const int64_t source_unit = SourceRow(update, number) + (begin << shift) - row.begin;
  WriteBytesOfVector(update, At<char>(update.dest, vector), static_cast<int>(begin - vector),
                     static_cast<int>(end - vector), source_unit * (has_bits ? update.bit_width : 8));
}

// ---------------------------------------------------------------------------------------------------------------------

// Moves up to kCount items of a row, kThreads apart.
template <int kCount, bool kTake>
__device__ __forceinline__ void Move(const Update& update, const Tiling& tiling, int64_t number, int64_t first) {
  if constexpr (kTake) {
    switch (update.word) {
      case 1:
        return MoveWords<uint8_t, kCount, kTake>(update, tiling, number, first);
      case 2:
        return MoveWords<uint16_t, kCount, kTake>(update, tiling, number, first);
      case 4:
        return MoveWords<uint32_t, kCount, kTake>(update, tiling, number, first);
      case 8:
        return MoveWords<uint2, kCount, kTake>(update, tiling, number, first);
      default:
        return MoveWords<uint4, kCount, kTake>(update, tiling, number, first);
    }
  } else if (HasWords(update, kTake)) {
    MoveWords<uint4, kCount, kTake>(update, tiling, number, first);
  } else {
    const Row row = LocateRow(update, number);
#pragma unroll 1
    for (int k = 0; k < kCount; ++k) WriteVectorOfArray(update, row, number, first + k * kThreads);
  }
}

template <int kMaxUpdates, bool kTake>
__global__ void __launch_bounds__(kThreads) MoveWindows(const __grid_constant__ Launch<kMaxUpdates> launch) {
  int i = 0;
  while (i + 1 < launch.count && blockIdx.x >= launch.tilings[i + 1].first_block) ++i;
  const Tiling& tiling = launch.tilings[i];
  const Update& update = launch.updates[i];
  const int64_t block = blockIdx.x - tiling.first_block;
  if (tiling.blocks_of_row > 0) {
    const QuotientAndRemainder q = Divide(block, tiling.blocks_of_row);
    return Move<kItems, kTake>(update, tiling, q.quotient, q.remainder * kItemsOfBlock + threadIdx.x);
  }
  const int64_t item = block * kThreads + threadIdx.x;
  if (item >= tiling.num_items) return;
  const QuotientAndRemainder q = Divide(item, tiling.items_of_row);
  Move<1, kTake>(update, tiling, q.quotient, q.remainder);
}

int64_t ItemsOfRow(const Update& update, bool takes) {
  if (HasWords(update, takes)) return update.run_units / update.word;
  const int64_t most_bytes = update.has_bits ? MaxBytesOfRow(update) : update.run_units;
  // The worst case: the row begins at the last word of a vector.
  return CeilDivide(most_bytes + (kVectorBytes - update.word), kVectorBytes);
}

Tiling TilingOf(const Update& update, bool takes) {
  Tiling tiling{};
  tiling.items_of_row = ItemsOfRow(update, takes);
  tiling.num_items = update.num_rows * tiling.items_of_row;
  const int64_t blocks_of_row = CeilDivide(tiling.items_of_row, kItemsOfBlock);
  const bool has_long_rows =
      Tuning::kMinFillDenominator * tiling.items_of_row >= Tuning::kMinFillNumerator * blocks_of_row * kItemsOfBlock;
  tiling.blocks_of_row = has_long_rows && tiling.num_items >= Tuning::kMinSharedItems ? blocks_of_row : 0;
  return tiling;
}

template <int kMaxUpdates, bool kTake>
CudaStatus LaunchSome(const Update* updates, int count, cudaStream_t stream) {
  Launch<kMaxUpdates> launch;
  launch.count = count;
  int64_t num_blocks = 0;
  for (int i = 0; i < count; ++i) {
    const Update& update = launch.updates[i] = updates[i];
    Tiling& tiling = launch.tilings[i] = TilingOf(update, kTake);
    tiling.first_block = static_cast<unsigned>(num_blocks);
    num_blocks +=
        tiling.blocks_of_row > 0 ? update.num_rows * tiling.blocks_of_row : CeilDivide(tiling.num_items, kThreads);
  }
  MoveWindows<kMaxUpdates, kTake><<<GridSize(num_blocks), kThreads, 0, stream>>>(launch);
  return JB_LAUNCH_STATUS(MoveWindows);
}

template <bool kTake>
CudaStatus LaunchAll(const std::vector<Update>& updates, cudaStream_t stream) {
  const int count = static_cast<int>(updates.size());
  for (int i = 0; i < count; i += kMaxUpdatesOfLaunch) {
    const int some = std::min(count - i, kMaxUpdatesOfLaunch);
    // Launches with fewer argument bytes are faster.
    const auto launch = some <= 2 ? LaunchSome<2, kTake> : LaunchSome<kMaxUpdatesOfLaunch, kTake>;
    JB_RETURN_IF_CUDA_ERROR(launch(updates.data() + i, some, stream));
  }
  return {};
}

WriteStrategy WriteStrategyOf(const Update& update) {
  const bool has_long_rows = TilingOf(update, /*takes=*/false).blocks_of_row > 0;
  if (HasWords(update, /*takes=*/false)) return has_long_rows ? WriteStrategy::kLongRowsOfWords : WriteStrategy::kWords;
  if (update.has_bits) return has_long_rows ? WriteStrategy::kLongRowsOfBits : WriteStrategy::kBits;
  return has_long_rows ? WriteStrategy::kLongRowsOfVectors : WriteStrategy::kVectors;
}

TakeStrategy TakeStrategyOf(const Update& update) {
  const bool has_long_rows = TilingOf(update, /*takes=*/true).blocks_of_row > 0;
  switch (update.word) {
    case 1:
      return has_long_rows ? TakeStrategy::kLongRowsOf1Byte : TakeStrategy::kWordsOf1Byte;
    case 2:
      return has_long_rows ? TakeStrategy::kLongRowsOf2Bytes : TakeStrategy::kWordsOf2Bytes;
    case 4:
      return has_long_rows ? TakeStrategy::kLongRowsOf4Bytes : TakeStrategy::kWordsOf4Bytes;
    case 8:
      return has_long_rows ? TakeStrategy::kLongRowsOf8Bytes : TakeStrategy::kWordsOf8Bytes;
    default:
      return has_long_rows ? TakeStrategy::kLongRowsOf16Bytes : TakeStrategy::kWordsOf16Bytes;
  }
}

}  // namespace

WriteStrategy ChooseWrite(const std::vector<Update>& updates) {
  if (AreSmall(updates)) {
    switch (updates[0].num_axes) {
      case 1:
        return WriteStrategy::kSmallWindowsOf1Axis;
      case 2:
        return WriteStrategy::kSmallWindowsOf2Axes;
      default:
        return WriteStrategy::kSmallWindowsOf3Axes;
    }
  }
  return CommonStrategy(updates, WriteStrategy::kNothing, WriteStrategy::kMixed, WriteStrategyOf);
}

TakeStrategy ChooseTake(const std::vector<Update>& updates) {
  return CommonStrategy(updates, TakeStrategy::kNothing, TakeStrategy::kMixed, TakeStrategyOf);
}

CudaStatus LaunchWrite(const std::vector<Update>& updates, cudaStream_t stream) {
  switch (ChooseWrite(updates)) {
    case WriteStrategy::kNothing:
      return {};
    case WriteStrategy::kSmallWindowsOf1Axis:
      return LaunchSmallOf<1>(updates, stream);
    case WriteStrategy::kSmallWindowsOf2Axes:
      return LaunchSmallOf<2>(updates, stream);
    case WriteStrategy::kSmallWindowsOf3Axes:
      return LaunchSmallOf<3>(updates, stream);
    default:
      return LaunchAll</*kTake=*/false>(updates, stream);
  }
}

CudaStatus LaunchTake(const std::vector<Update>& updates, cudaStream_t stream) {
  for (const Update& update : updates) {
    if (!update.may_be_outside) continue;
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(update.source, 0, static_cast<size_t>(update.source_bytes), stream));
  }
  return LaunchAll</*kTake=*/true>(updates, stream);
}

}  // namespace jax_baracuda::write_slice
