// How the kernels for rows along the length ([.., channels, length]) assign their work.
//
// A row is cut into tiles, one for each group of neighbouring threads. In a tile each thread takes one vector a
// step. Tiles begin at a sector of memory, whatever the row: vectors at a row's two ends may hold inputs of the
// rows beside it. The groups of a warp take the same tile of neighbouring rows, so that packed sequences, which
// begin at the same times in these, disturb few warps.
#pragma once

#include <limits>
#include <numeric>

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/conv_device.cuh"
#include "ffi/causal_conv1d/tuning.h"
#include "ffi/core/async_copy.cuh"
#include "ffi/core/warp.cuh"

namespace jax_baracuda::causal_conv1d {

inline constexpr int kRowsThreads = 128;
inline constexpr int64_t kSectorBytes = 32;
inline constexpr int kMaxSteps = 32;  // of a tile: as many as a word has bits

// Depends on shapes alone, not on addresses or the device, so that the number of partial sums does too.
struct RowsPlan {
  int lanes;  // threads of a group: a power of two, 4 to 32
  int log_lanes;
  int steps;      // of a tile
  int64_t tiles;  // of a row
  int64_t warps;

  // Minimises the modelled time over the lengths of tiles and the sizes of groups.
  RowsPlan(const Problem& problem, int64_t element_bytes, const RowsChoice& choice) {
    const int64_t vec = kVectorBytes / element_bytes, sector = kSectorBytes / element_bytes;
    // From the sector where it begins, the farthest inside of which a row begins.
    const int64_t most_before = sector - std::gcd(problem.length, sector);
    const int64_t vectors = std::max<int64_t>(CeilDivide(most_before + problem.length, vec), 1);
    const int64_t rows = problem.batch * problem.examples * problem.channels;
    const double warps_at_once = Tuning::kMultiprocessors * choice.blocks_at_once * (kRowsThreads / kWarpThreads);
    double least = std::numeric_limits<double>::infinity();
    for (int narrowing = 0; narrowing <= 3; ++narrowing) {
      const int64_t row_steps = CeilDivide(vectors, int64_t{kWarpThreads} >> narrowing);
      const int64_t row_warps = CeilDivide(rows, int64_t{1} << narrowing);
      for (int64_t wanted = std::min<int64_t>(row_steps, choice.max_steps);; wanted -= wanted > 8 ? 2 : 1) {
        const int64_t candidate_tiles = CeilDivide(row_steps, wanted);
        const int64_t candidate_steps = CeilDivide(row_steps, candidate_tiles);
        const double time = (static_cast<double>(row_warps * candidate_tiles) + Tuning::kTailOfLaunch * warps_at_once) *
                            (static_cast<double>(candidate_steps) + choice.steps_to_start) * choice.slowness[narrowing];
        if (time < least) {
          least = time;
          lanes = kWarpThreads >> narrowing;
          log_lanes = 5 - narrowing;
          steps = static_cast<int>(candidate_steps);
          tiles = candidate_tiles;
          warps = row_warps * tiles;
        }
        if (wanted <= choice.min_steps) break;
      }
    }
  }

  int64_t Blocks() const { return CeilDivide(warps, kRowsThreads / kWarpThreads); }
};

// Of rows with elements.
inline Tiling TilingOf(const Problem& problem, const RowsPlan& plan, int64_t element_bytes, bool is_shared,
                       bool is_aligned) {
  // Vectors must lie in the sectors of each operand that is accessed as they do in those of the result.
  const int64_t batch_bytes = problem.examples * problem.channels * problem.length * element_bytes;
  if (!is_aligned || (is_shared && problem.batch > 1 && batch_bytes % kSectorBytes != 0)) return Tiling::kRowsByElement;
  if (plan.tiles > 1) return Tiling::kSplitRows;
  return plan.lanes < kWarpThreads ? Tiling::kPackedRows : Tiling::kRows;
}

struct RowsGrid {
  RowsPlan plan;
  Divider by_tiles;
  bool is_vectorized;

  RowsGrid(const RowsPlan& rows_plan, Tiling tiling)
      : plan(rows_plan), by_tiles(rows_plan.tiles), is_vectorized(tiling != Tiling::kRowsByElement) {}
};

// The place of a thread: the first vector that it takes of its tile. Vectors are counted by how many inputs further
// on they begin, so that 32 bits are enough.
template <typename T>
struct RowsPlace {
  static constexpr int kVec = kVectorBytes / sizeof(T);

  int64_t row, example, channel, tile;
  int64_t begin;      // the time of the vector's first input, negative where it belongs to the row before
  int64_t index;      // of that input in the result
  int before, after;  // inputs of the row before that and from there on; numbers too large for us are cut
  int step;           // inputs from one vector of the thread to the next
  bool is_real, is_vectorized;
  // The least and greatest offsets of vectors that can be read as such, and of those that lie in the row with all that
  // their outputs need.
  int first_readable, last_readable, first_regular, last_regular;

  // `past` inputs before a vector belong to it.
  __device__ __forceinline__ RowsPlace(const Geometry& geometry, const RowsGrid& grid, int past, bool has_state) {
    constexpr int64_t kFar = 1 << 30;
    const int lanes = grid.plan.lanes, lane = threadIdx.x & (lanes - 1);
    const int64_t warp = (int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) / kWarpThreads;
    const int64_t rows_of_warp = grid.by_tiles.Quotient(warp);
    row = (rows_of_warp * kWarpThreads + threadIdx.x % kWarpThreads) >> grid.plan.log_lanes;
    tile = warp - rows_of_warp * grid.plan.tiles;
    is_real = row < geometry.all_examples * geometry.channels;
    if (!is_real) row = 0;
    is_vectorized = grid.is_vectorized;
    example = geometry.by_channels.Quotient(row);
    channel = row - example * geometry.channels;
    step = lanes * kVec;
    // Alignment needs the lowest bits alone.
    const unsigned first = static_cast<unsigned>(row) * static_cast<unsigned>(geometry.length);
    const unsigned shift = is_vectorized ? first % (kSectorBytes / sizeof(T)) : 0;
    begin = tile * (grid.plan.steps * step) + (lane * kVec - static_cast<int>(shift));
    index = row * geometry.length + begin;
    before = static_cast<int>(min(begin, kFar));
    after = static_cast<int>(max(min(geometry.length - begin, kFar), -kFar));
    // Without a state all before time 0 is zeros, and these are read where a vector begins at time 0.
    first_regular = is_vectorized && is_real ? (shift != 0 || has_state ? past : 0) - before : after;
    last_regular = after - kVec;
    // A vector may run past its row, but not past the end of memory.
    const bool may_overrun = row + 1 < geometry.all_examples * geometry.channels && geometry.length >= kVec;
    first_readable = 1 - kVec - before;
    last_readable = !is_vectorized || !is_real ? -(1 << 30) : may_overrun ? after - 1 : after - kVec;
  }

  // The same place in an operand, which may be shared by the batch.
  __device__ __forceinline__ const T* In(const Input<T>& input, const Geometry& geometry) const {
    if (!input.is_shared) return input.data + index;
    return input.data + index - (example - input.Example(geometry, example)) * geometry.channels * geometry.length;
  }

  // Whether the vector `offset` inputs further on, and all that its outputs need, lies in the row.
  __device__ __forceinline__ bool IsRegular(int offset) const {
    return offset >= first_regular && offset <= last_regular;
  }
  __device__ __forceinline__ bool IsReadable(int offset) const {
    return offset >= first_readable && offset <= last_readable;
  }
  __device__ __forceinline__ bool Overlaps(int offset) const { return offset < after && before + offset > -kVec; }
  __device__ __forceinline__ bool IsWhole(int offset) const {
    return is_vectorized && before + offset >= 0 && offset + kVec <= after;
  }
};

// The steps of a warp's tile, as bits, that may hold a border of packed sequences: in the others, the times of a step
// and `further` ones after these have all of the first `width` bits set. `masks` begins at the thread's first vector.
template <typename T>
__device__ __forceinline__ uint32_t StepsWithBorders(const RowsPlace<T>& at, const RowsPlan& plan, const uint8_t* masks,
                                                     int width, int further) {
  constexpr int kTimes = kVectorBytes, kLoads = 4;  // of a load; under way at once
  // Times are counted from the tile's first one.
  const int lane = threadIdx.x & (plan.lanes - 1), own = lane * RowsPlace<T>::kVec;
  const uint8_t* const tile_masks = masks - own;
  const int row_begin = own - at.before, row_end = own + at.after, end = min(plan.steps * at.step + further, row_end);
  const int misplaced = static_cast<int>(reinterpret_cast<uintptr_t>(tile_masks) % kTimes);
  const int apart = plan.lanes * kTimes, log_step = __ffs(at.step) - 1;
  const uint32_t bits = 0x01010101u * ((1u << width) - 1);
  uint32_t borders = 0;
  for (int first = lane * kTimes - misplaced; first < end; first += kLoads * apart) {
    uint4 words[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int time = first + i * apart;
      // What is not wholly in the row counts as a border.
      const uint32_t others = time < end ? 0 : bits;
      words[i] = make_uint4(others, others, others, others);
      if (time >= row_begin && time < end && time + kTimes <= row_end) {
        words[i] = LoadPacked<kTimes>(tile_masks + time);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if ((words[i].x & words[i].y & words[i].z & words[i].w & bits) == bits) continue;
      const int time = first + i * apart;
      const int first_step = max(time - further, 0) >> log_step;
      const int last_step = min(max(time + kTimes - 1, 0) >> log_step, kMaxSteps - 1);
      borders |= (2u << last_step) - (1u << first_step);
    }
  }
  return __reduce_or_sync(kFullWarp, borders);
}

// A group's vectors of some steps in shared memory. Those of neighbouring threads and of steps that follow each other
// are neighbours there as they are in the row, in a circle.
template <typename T>
struct VectorStages {
  static constexpr int kVec = kVectorBytes / sizeof(T);

  unsigned base, mask;

  // Room for the vectors of kSteps steps of a block, a power of two.
  template <int kSteps>
  static constexpr int kBlockBytes = kSteps * kRowsThreads * kVectorBytes;

  template <int kSteps>
  static __device__ __forceinline__ VectorStages Make(const RowsPlan& plan) {
    static_assert((kSteps & (kSteps - 1)) == 0);
    const unsigned group = threadIdx.x >> plan.log_lanes, log_bytes = plan.log_lanes + 4;
    static_assert(kVectorBytes == 1 << 4);
    return {group * kSteps << log_bytes, (unsigned{kSteps} << log_bytes) - 1};
  }

  // Where in the block's stages lies what is `position` bytes, which may be negative, into the group's circle.
  __device__ __forceinline__ unsigned Index(unsigned position) const { return (position & mask) | base; }

  // window[i] becomes the input i - kPast places from the first of the vector at a position.
  template <int kPast>
  __device__ __forceinline__ void Read(const char* stages, unsigned position, ComputeType<T>* window) const {
    // The past is read in the largest aligned words that no vector's border cuts.
    constexpr int kPastBytes = kPast * static_cast<int>(sizeof(T));
    constexpr int kMin = sizeof(T) > 4 ? sizeof(T) : 4;
    constexpr int kWordBytes = kPastBytes <= kMin ? kMin : kPastBytes <= 8 ? 8 : 16;
    constexpr int kWord = kWordBytes / sizeof(T), kWords = CeilDivide(kPast, kWord), kHalo = kWord * kWords;
    const auto word_at = [&](unsigned from) { return reinterpret_cast<const T*>(stages + Index(from)); };
    ComputeType<T> all[kHalo + kVec];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      Widen<T, kWord>(LoadPacked<kWord>(word_at(position - (kWords - i) * kWordBytes)), all + i * kWord);
    }
    Widen<T, kVec>(LoadPacked<kVec>(word_at(position)), all + kHalo);
#pragma unroll
    for (int i = 0; i < kPast + kVec; ++i) window[i] = all[kHalo - kPast + i];
  }
};

// The window of a vector that is not regular, where `window` holds what was read of it as a vector, if it was: zeros
// outside of the row, but for `state_length` inputs of the initial state, of which `state_end` is the end, before it.
// `vector` is the vector's address.
template <int kPast, typename T>
__device__ __forceinline__ void MendWindow(const RowsPlace<T>& at, int offset, const T* vector, const T* state_end,
                                           int state_length, ComputeType<T>* window) {
  using C = ComputeType<T>;
  constexpr int kVec = RowsPlace<T>::kVec;
  const int time = at.before + offset, left = at.after - offset;  // inputs before and from the vector on, in the row
  if (at.Overlaps(offset) && !at.IsReadable(offset)) {
#pragma unroll
    for (int i = 0; i < kPast + kVec; ++i) {
      const int place = i - kPast;
      window[i] = place >= -time && place < left ? static_cast<C>(vector[place]) : C{0};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPast + kVec; ++i) {
      const int place = i - kPast;
      window[i] = place >= -time && place < left ? window[i] : C{0};
    }
  }
  if (state_end != nullptr && time < kPast) {
#pragma unroll
    for (int i = 0; i < kPast + kVec; ++i) {
      const int t = time + i - kPast;
      if (t < 0 && t >= -state_length) window[i] = static_cast<C>(state_end[t]);
    }
  }
}

// Stores what of a vector lies in the row.
template <typename T>
__device__ __forceinline__ void StoreInRow(const RowsPlace<T>& at, int offset, T* vector,
                                           const ComputeType<T>* values) {
  constexpr int kVec = RowsPlace<T>::kVec;
  if (at.IsWhole(offset)) {
    StoreNarrow<T, kVec>(vector, values);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (at.before + offset + i >= 0 && offset + i < at.after) vector[i] = static_cast<T>(values[i]);
    }
  }
}

}  // namespace jax_baracuda::causal_conv1d
