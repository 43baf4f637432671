// Stable radix sort of rows by segment.
#pragma once

#include "ffi/core/cuda_status.h"
#include "ffi/segment/engine/device.cuh"

namespace jax_baracuda::segment {

// Rows and segments, numbered over the whole batch (see OrderFits). A single batch element always fits if SegmentsFit.
struct SegmentOrder {
  uint32_t* segments = nullptr;  // ascending; batch * segments for dropped rows, which come last
  uint32_t* rows = nullptr;
};

// The rows of all batch elements, numbered over the whole batch, with their segments.
struct JoinedRows {
  SegmentIds ids;
  uint32_t rows;     // per batch element
  uint32_t total;    // in the whole batch
  uint32_t dropped;  // the segment of a dropped row
  bool ids_are_shared;

  // Loads the segments of rows begin + first, begin + first + stride, ...; kDropped where the offset first + i * stride
  // is not below `count`.
  template <int kCount>
  __device__ __forceinline__ void Load(uint32_t begin, int first, int stride, int count,
                                       uint32_t (&segments)[kCount]) const {
    const bool is_batched = total != rows;
    const auto row_of = [&](int i) { return begin + min(first + i * stride, count - 1); };
    const auto id_of = [&](int i) { return is_batched && ids_are_shared ? row_of(i) % rows : row_of(i); };
    if (ids.are_64_bit) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) segments[i] = ids[id_of(i)];
    } else {
      // All loads before the first use, so that the thread waits for memory once.
      int narrow_ids[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) narrow_ids[i] = __ldg(static_cast<const int*>(ids.ids) + id_of(i));
#pragma unroll
      for (int i = 0; i < kCount; ++i) segments[i] = ids.Segment(narrow_ids[i]);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (segments[i] == kDropped) {
        segments[i] = dropped;
      } else if (is_batched) {
        segments[i] += row_of(i) / rows * static_cast<uint32_t>(ids.segments);
      }
      if (first + i * stride >= count) segments[i] = kDropped;
    }
  }
};

// Bits needed for numbers up to this one.
inline int BitsUpTo(uint64_t number) {
  int bits = 1;
  while ((number >> bits) != 0) ++bits;
  return bits;
}

int64_t RadixSortScratchBytes(int64_t rows, uint32_t dropped);

// Stable. `scratch` is 256-byte aligned and holds RadixSortScratchBytes. `other` is a work buffer as large as `sorted`.
CudaStatus LaunchRadixSort(const JoinedRows& joined, const SegmentOrder& sorted, const SegmentOrder& other,
                           char* scratch, cudaStream_t stream);

}  // namespace jax_baracuda::segment
