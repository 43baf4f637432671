// How the kernels for rows along the length ([.., channels, length]) deal out their work.
//
// A row is cut into stretches, one for each group of neighbouring threads. In a stretch each thread takes one vector a
// step. Vectors are aligned in memory, whatever the row: those at a row's two ends may hold inputs of the rows beside
// it.
#pragma once

#include "ffi/causal_conv1d/conv_device.cuh"
#include "ffi/core/async_copy.cuh"

namespace jax_baracuda::causal_conv1d {

inline constexpr int kRowsThreads = 128;
inline constexpr unsigned kWholeWarp = 0xffffffffu;

// Depends on shapes alone, not on addresses, so that the number of partial sums does too.
struct RowsPlan {
  int lanes;          // threads of a group: a power of two, 4 to 32
  int log_lanes;
  int steps;          // of a stretch
  int64_t stretches;  // of a row
  int64_t groups;

  RowsPlan() = default;
  RowsPlan(const Problem& problem, int64_t element_bytes) {
    constexpr int64_t kUsualSteps = 16, kFewestSteps = 4, kEnoughWarps = 1 << 13;
    const int64_t vec = kVectorBytes / element_bytes;
    // A row that begins inside of a vector may touch one vector more than it fills.
    const int64_t vectors = std::max<int64_t>(problem.length / vec + (problem.length % vec == 0 ? 0 : 2), 1);
    const int64_t rows = problem.batch * problem.examples * problem.channels;
    int64_t usual_steps = kUsualSteps;
    for (;; usual_steps /= 2) {
      // As few threads as take a row in one stretch, or a warp. A little more than the usual steps are better than
      // another stretch.
      log_lanes = 2;
      const int64_t too_many = usual_steps + usual_steps / 2;
      while (log_lanes < 5 && CeilDivide(vectors, int64_t{1} << log_lanes) >= too_many) ++log_lanes;
      lanes = 1 << log_lanes;
      const int64_t row_steps = CeilDivide(vectors, lanes);
      stretches = std::max<int64_t>((row_steps + usual_steps / 2) / usual_steps, 1);
      steps = static_cast<int>(CeilDivide(row_steps, stretches));
      groups = rows * stretches;
      if (groups * lanes >= 32 * kEnoughWarps || usual_steps == kFewestSteps) break;
    }
  }

  int64_t Blocks() const { return CeilDivide(groups, kRowsThreads >> log_lanes); }
};

struct RowsGrid {
  RowsPlan plan;
  Divider by_stretches;
  bool is_vectorized;  // false where addresses are not aligned: then all is done one element at a time

  // Vectors must lie in each operand that is accessed as they do in the result.
  RowsGrid(const Problem& problem, const RowsPlan& rows_plan, int64_t element_bytes, bool is_aligned, bool is_shared)
      : plan(rows_plan), by_stretches(rows_plan.stretches) {
    const int64_t batch_bytes = problem.examples * problem.channels * problem.length * element_bytes;
    is_vectorized = is_aligned && (!is_shared || batch_bytes % kVectorBytes == 0);
  }
};

// The place of a thread: the first vector that it takes of its stretch. Vectors are counted by how many inputs further
// on they begin, so that 32 bits are enough.
template <typename T>
struct RowsPlace {
  static constexpr int kVec = kVectorBytes / sizeof(T);

  int64_t row, example, channel, stretch;
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
    const int64_t group = (int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) >> grid.plan.log_lanes;
    is_real = group < grid.plan.groups;
    is_vectorized = grid.is_vectorized;
    const int64_t real_group = is_real ? group : 0;
    row = grid.by_stretches.Quotient(real_group);
    stretch = real_group - row * grid.plan.stretches;
    example = geometry.by_channels.Quotient(row);
    channel = row - example * geometry.channels;
    step = lanes * kVec;
    // Alignment needs the lowest bits alone.
    const unsigned first = static_cast<unsigned>(row) * static_cast<unsigned>(geometry.length);
    const unsigned shift = is_vectorized ? first % kVec : 0;
    begin = stretch * (grid.plan.steps * step) + (lane * kVec - static_cast<int>(shift));
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

// A group's vectors of some steps in shared memory. Those of neighbouring threads and of steps that follow each other
// are neighbours there as they are in the row, in a circle.
template <typename T>
struct VectorRing {
  static constexpr int kVec = kVectorBytes / sizeof(T);

  unsigned base, mask;

  // Room for the vectors of kSteps steps of a block, a power of two.
  template <int kSteps>
  static constexpr int kBlockBytes = kSteps * kRowsThreads * kVectorBytes;

  template <int kSteps>
  static __device__ __forceinline__ VectorRing Make(const RowsPlan& plan) {
    static_assert((kSteps & (kSteps - 1)) == 0);
    const unsigned group = threadIdx.x >> plan.log_lanes, log_bytes = plan.log_lanes + 4;
    static_assert(kVectorBytes == 1 << 4);
    return {group * kSteps << log_bytes, (unsigned{kSteps} << log_bytes) - 1};
  }

  // Where in the block's ring lies what is `position` bytes, which may be negative, into the group's circle.
  __device__ __forceinline__ unsigned Index(unsigned position) const { return (position & mask) | base; }

  // window[i] becomes the input i - kPast places from the first of the vector at a position.
  template <int kPast>
  __device__ __forceinline__ void Read(const char* ring, unsigned position, ComputeType<T>* window) const {
    // The past is read in the largest aligned parts that no vector's border cuts.
    constexpr int kPastBytes = kPast * static_cast<int>(sizeof(T));
    constexpr int kLeast = sizeof(T) > 4 ? sizeof(T) : 4;
    constexpr int kPartBytes = kPastBytes <= kLeast ? kLeast : kPastBytes <= 8 ? 8 : 16;
    constexpr int kPart = kPartBytes / sizeof(T), kParts = (kPast + kPart - 1) / kPart, kHalo = kPart * kParts;
    const auto part_at = [&](unsigned from) { return reinterpret_cast<const T*>(ring + Index(from)); };
    ComputeType<T> all[kHalo + kVec];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      Widen<T, kPart>(LoadPacked<kPart>(part_at(position - (kParts - i) * kPartBytes)), all + i * kPart);
    }
    Widen<T, kVec>(LoadPacked<kVec>(part_at(position)), all + kHalo);
#pragma unroll
    for (int i = 0; i < kPast + kVec; ++i) window[i] = all[kHalo - kPast + i];
  }
};

// The window of a vector that is not regular, where `window` holds what was read of it as a vector, if it was: zeros
// outside of the row, but for the initial state, of which `state_end` is the end, before it. `vector` is the vector's
// address.
template <int kPast, typename T>
__device__ __forceinline__ void MendWindow(const RowsPlace<T>& at, int offset, const T* vector, const T* state_end,
                                           ComputeType<T>* window) {
  using C = ComputeType<T>;
  constexpr int kVec = RowsPlace<T>::kVec;
  const int time = at.before + offset, left = at.after - offset;  // inputs before and from the vector on, in the row
  if (!at.IsReadable(offset)) {
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
      if (t < 0 && t >= -kPast) window[i] = static_cast<C>(state_end[t]);
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
