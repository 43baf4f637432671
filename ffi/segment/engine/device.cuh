// Shared by the CUDA kernels of the segment ops: segment ids, and the assignment of features to threads.
#pragma once

#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/core/integers.h"
#include "ffi/core/vectors.cuh"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// The segment of a row whose id is out of range. Kernels number segments in 32 bits; launchers refuse larger calls.
inline constexpr uint32_t kDropped = 0xffffffffu;

inline bool SegmentsFit(int64_t segments) { return segments < static_cast<int64_t>(kDropped); }

// Kernels multiply numbers of rows by features in 32 bits, which takes one instruction. Launchers refuse wider rows.
inline bool FeaturesFit(int64_t features) { return features <= int64_t{UINT32_MAX}; }

__device__ __forceinline__ int64_t FirstElement(uint32_t row, int64_t features) {
  return static_cast<int64_t>(uint64_t{row} * static_cast<uint32_t>(features));
}

struct SegmentIds {
  const void* ids;
  bool are_64_bit;
  int64_t segments;

  __device__ __forceinline__ int64_t Id(int64_t index) const {
    return are_64_bit ? __ldg(static_cast<const long long*>(ids) + index)
                      : static_cast<int64_t>(__ldg(static_cast<const int*>(ids) + index));
  }

  // The segment at this index of the ids, or kDropped.
  __device__ __forceinline__ uint32_t operator[](int64_t index) const { return Segment(Id(index)); }

  // Calls take(i, segment) for the rows index + i, i < kCount. Past `count` the last row's segment is passed again, so
  // that nothing out of bounds is read.
  template <int kCount, typename Take>
  __device__ __forceinline__ void LoadRun(int64_t index, int count, Take&& take) const {
    const int* address = static_cast<const int*>(ids) + index;
    if (kCount % 4 == 0 && count == kCount && !are_64_bit && AreAligned(kVectorBytes, address)) {
#pragma unroll
      for (int i = 0; i + 3 < kCount; i += 4) {
        const Vector<int, 4> run = LoadStreaming<4>(address + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) take(i + j, Segment(run.lane[j]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) take(i, (*this)[index + min(i, count - 1)]);
    }
  }

  __device__ __forceinline__ uint32_t Segment(int64_t id) const {
    return static_cast<uint64_t>(id) < static_cast<uint64_t>(segments) ? static_cast<uint32_t>(id) : kDropped;
  }
};

// Assignment of a row's features to threads: `lanes` neighbouring threads, one vector each. A row wider than that is
// split into `columns` column blocks.
struct FeatureLanes {
  int lanes;
  int columns;
};

// Blocks have whole units of `unit` vectors.
inline FeatureLanes AssignFeatures(int64_t vectors, int max_lanes, int unit = 1) {
  const int64_t units = vectors / unit, columns = CeilDivide(units, max_lanes / unit);
  // Columns of even width, so that none is left with only a few features.
  return {static_cast<int>(CeilDivide(units, columns)) * unit, static_cast<int>(columns)};
}

// Bytes of the widest vector of a thread: at most 8 elements, so that they stay packed in registers.
constexpr int WidestVectorBytes(int element_bytes) { return element_bytes == 1 ? 4 : 16; }

// The widest vector, in elements, that divides the row and so is aligned in every row: 16 bytes, 8 of 16-bit elements,
// or 4. Rows of 100 or 300 16-bit elements take 0.66 to 0.83 of the time that vectors of 4 bytes take (H200).
inline int RowVector(int64_t features, int64_t element_bytes) {
  for (const int64_t bytes : {WidestVectorBytes(static_cast<int>(element_bytes)), element_bytes == 2 ? 8 : 4, 4}) {
    if (bytes > element_bytes && features * element_bytes % bytes == 0) return static_cast<int>(bytes / element_bytes);
  }
  return 1;
}

// Calls body(std::integral_constant<int, n>{}) for n = RowVector(features, sizeof(T)).
template <typename T, typename Body>
auto DispatchRowVector(int64_t features, Body&& body) {
  constexpr int kWidest = WidestVectorBytes(sizeof(T)) / static_cast<int>(sizeof(T));
  const int vector = RowVector(features, sizeof(T));
  if (vector == kWidest) return body(std::integral_constant<int, kWidest>{});
  if constexpr (sizeof(T) == 2) {
    if (vector == 4) return body(std::integral_constant<int, 4>{});
    if (vector == 2) return body(std::integral_constant<int, 2>{});
  }
  return body(std::integral_constant<int, 1>{});
}

}  // namespace jax_baracuda::segment
