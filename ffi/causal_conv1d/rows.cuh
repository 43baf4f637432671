// Work assignment of the kernels for rows along the length ([.., channels, length]).
//
// A row is cut into tiles. A group of neighbouring threads processes one tile; in each step, each thread processes one
// vector. Tiles begin at a sector of memory even if the row does not, so vectors at the ends of a row may include
// inputs of the neighbouring rows. The groups of a warp process the same tile of neighbouring rows. The borders of
// packed sequences are at the same times in these rows, so few warps contain a border.
#pragma once

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/conv_device.cuh"
#include "ffi/core/async_copy.cuh"
#include "ffi/core/warp.cuh"

namespace jax_baracuda::causal_conv1d {

inline constexpr int kMaxSteps = 32;  // per tile: StepsWithBorders has one bit per step

struct RowsGrid {
  RowsPlan plan;
  Divider by_tiles;
  bool is_vectorized;

  explicit RowsGrid(const ConvolutionPlan& convolution_plan)
      : plan(convolution_plan.rows),
        by_tiles(plan.tiles),
        is_vectorized(convolution_plan.strategy == Strategy::kRows) {}

  uint32_t Blocks() const { return GridSize(CeilDivide(plan.warps, kRowsThreads / kWarpThreads)); }
};

// The position of a thread: the first vector of its tile. Other vectors are given by their offset from it, in inputs,
// so that 32 bits are enough.
template <typename T>
struct RowsPlace {
  static constexpr int kVec = kVectorBytes / sizeof(T);

  int64_t row, example, channel, tile;
  int64_t begin;      // the time of the vector's first input; negative if that input belongs to the previous row
  int64_t index;      // the index of that input in the result
  int before, after;  // inputs of the row before `begin` and from `begin` on, clamped to 2^30
  int step;           // inputs from one vector of the thread to the next
  bool is_real, is_vectorized;
  // The first and last offset of readable vectors, which can be loaded as vectors, and of regular vectors: these are
  // inside the row, with all inputs that their outputs need.
  int first_readable, last_readable, first_regular, last_regular;

  // The outputs of a vector also need the `past` inputs before it.
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
    // 32 bits suffice: alignment depends only on the lowest bits.
    const unsigned first = static_cast<unsigned>(row) * static_cast<unsigned>(geometry.length);
    const unsigned shift = is_vectorized ? first % (kSectorBytes / sizeof(T)) : 0;
    begin = tile * (grid.plan.steps * step) + (lane * kVec - static_cast<int>(shift));
    index = row * geometry.length + begin;
    before = static_cast<int>(min(begin, kFar));
    after = static_cast<int>(max(min(geometry.length - begin, kFar), -kFar));
    // Without a state, inputs before time 0 are zeros. A vector that begins at time 0 finds them in the stages, since
    // unreadable vectors are loaded as zeros.
    first_regular = is_vectorized && is_real ? (shift != 0 || has_state ? past : 0) - before : after;
    last_regular = after - kVec;
    // A vector may extend past its row, but not past the end of the array.
    const bool may_overrun = row + 1 < geometry.all_examples * geometry.channels && geometry.length >= kVec;
    first_readable = 1 - kVec - before;
    last_readable = !is_vectorized || !is_real ? -(1 << 30) : may_overrun ? after - 1 : after - kVec;
  }

  // The same position in an operand, which the batch may share.
  __device__ __forceinline__ const T* In(const Input<T>& input, const Geometry& geometry) const {
    if (!input.is_shared) return input.data + index;
    return input.data + index - (example - input.Example(geometry, example)) * geometry.channels * geometry.length;
  }

  // Whether the vector at `offset`, with all inputs that its outputs need, is inside the row.
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

// The steps of a warp's tile that may contain a border of packed sequences, as bits. In every other step, the masks of
// its times and of the next `further` times have their first `width` bits set. `masks` begins at the thread's first
// vector.
template <typename T>
__device__ __forceinline__ uint32_t StepsWithBorders(const RowsPlace<T>& at, const RowsPlan& plan, const uint8_t* masks,
                                                     int width, int further) {
  constexpr int kTimes = kVectorBytes, kLoads = 4;  // times per load; loads in flight
  // Times are relative to the tile's first one.
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
      // A load that is not entirely in the row counts as a border.
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

// A circular buffer in shared memory with a group's vectors of several steps, in the order of the row: vectors of
// neighbouring threads are adjacent, and so are those of consecutive steps.
template <typename T>
struct VectorStages {
  static constexpr int kVec = kVectorBytes / sizeof(T);

  unsigned base, mask;

  // Bytes of a block's stages for kSteps steps, a power of two.
  template <int kSteps>
  static constexpr int kBlockBytes = kSteps * kRowsThreads * kVectorBytes;

  template <int kSteps>
  static __device__ __forceinline__ VectorStages Make(const RowsPlan& plan) {
    static_assert((kSteps & (kSteps - 1)) == 0);
    const unsigned group = threadIdx.x >> plan.log_lanes, log_bytes = plan.log_lanes + 4;
    static_assert(kVectorBytes == 1 << 4);
    return {group * kSteps << log_bytes, (unsigned{kSteps} << log_bytes) - 1};
  }

  // The byte offset in the block's stages of byte `position` of the group's circular buffer. `position` may be
  // negative.
  __device__ __forceinline__ unsigned Index(unsigned position) const { return (position & mask) | base; }

  // Sets window[i] to the input at index i - kPast, relative to the first input of the vector at `position`.
  template <int kPast>
  __device__ __forceinline__ void Read(const char* stages, unsigned position, ComputeType<T>* window) const {
    // Reads the past inputs as large aligned words that do not cross vectors.
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

// Corrects the window of a vector that is not regular. `window` holds what was read from the stages; a vector that is
// not readable is loaded from its address `vector`. Inputs outside the row become zeros. The `state_length` inputs
// before the row come from the initial state, which ends at `state_end`; nullptr without a state.
template <int kPast, typename T>
__device__ __forceinline__ void MendWindow(const RowsPlace<T>& at, int offset, const T* vector, const T* state_end,
                                           int state_length, ComputeType<T>* window) {
  using C = ComputeType<T>;
  constexpr int kVec = RowsPlace<T>::kVec;
  const int time = at.before + offset, left = at.after - offset;  // inputs of the row before the vector and from it on
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

// Stores the elements of a vector that are inside the row.
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
