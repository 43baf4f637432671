// Sorts few rows by segment in one launch, without communication between blocks.
//
// A block owns a range of neighbouring segments. It reads all ids, keeps the rows of its segments, and sorts those in
// shared memory. Each warp reads a range of rows in order, so that the sort is stable.
#pragma once

#include <algorithm>

#include "ffi/core/warp.cuh"
#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

inline constexpr int kFewRowThreads = 512;
inline constexpr int kFewRowWarps = kFewRowThreads / kWarpThreads;
// One thread adds up the counts of each. More would need more than 99 KB of shared memory for the widest accumulators.
inline constexpr int64_t kMaxOwnSegments = kFewRowThreads / 2;

// Segments per block, such that the blocks of all `parts` (batch elements and column blocks) fill the GPU.
inline int OwnSegments(int64_t segments, int64_t parts) {
  const int64_t blocks = std::max(Tuning::kMultiprocessors / std::max(parts, int64_t{1}), int64_t{1});
  return static_cast<int>(std::clamp(CeilDivide(segments, blocks), int64_t{1}, kMaxOwnSegments));
}

// Sorts the rows of the segments [first_segment, first_segment + own_segments) of one batch element.
class FewRowSorter {
 public:
  __host__ __device__ FewRowSorter(int rows, int own_segments) : rows_(rows), own_segments_(own_segments) {}

  __host__ __device__ int Bytes() const {
    return RoundUp(ListBytes(), 16) + RoundUp(2 * rows_, 16) + RoundUp(2 * (own_segments_ + 1), 16) + CountBytes();
  }

  // The first bytes of the shared memory, which are free again after Sort.
  __host__ __device__ int FreeBytes() const { return static_cast<int>(RoundUp(ListBytes(), 16)); }

  // Called by all threads. segment_of(row) is the segment of a row below `rows`. Returns the number of rows whose
  // segment is below `first_segment`, if `kCountsRowsBefore`.
  template <bool kCountsRowsBefore, typename SegmentOf>
  __device__ __forceinline__ int Sort(char* shared, uint32_t first_segment, const SegmentOf& segment_of) {
    uint16_t* const lists = reinterpret_cast<uint16_t*>(shared);
    sorted_ = reinterpret_cast<uint16_t*>(shared + RoundUp(ListBytes(), 16));
    starts_ = sorted_ + RoundUp(rows_, 8);
    uint16_t* const counts = starts_ + RoundUp(own_segments_ + 1, 8);  // [warps, own_segments]
    const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const uint32_t lanes_before = (1u << lane) - 1;
    const uint32_t own_segments = own_segments_;
    uint16_t* const list = lists + warp * WarpRows();
    uint16_t* const own_counts = counts + warp * own_segments_;
    for (int i = lane; i < own_segments_; i += kWarpThreads) own_counts[i] = 0;

    // The rows of the block's segments, and how many rows come before.
    constexpr int kInFlight = 4;
    int kept = 0, before = 0;
    const int end = min((warp + 1) * WarpRows(), rows_);
    for (int first = warp * WarpRows(); first < end; first += kInFlight * kWarpThreads) {
      uint32_t segments[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) segments[u] = segment_of(min(first + u * kWarpThreads + lane, rows_ - 1));
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int row = first + u * kWarpThreads + lane;
        const bool is_own = row < end && segments[u] - first_segment < own_segments;
        const uint32_t own_lanes = __ballot_sync(kFullWarp, is_own);
        if (is_own) list[kept + __popc(own_lanes & lanes_before)] = static_cast<uint16_t>(row);
        kept += __popc(own_lanes);
        if (kCountsRowsBefore) before += __popc(__ballot_sync(kFullWarp, row < end && segments[u] < first_segment));
      }
    }
    __syncwarp();

    // Counts the rows of each segment, twice: first to find the segments' places, then to find those of the rows.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      const bool has_places = pass == 1;
#pragma unroll 1
      for (int first = 0; first < kept; first += kWarpThreads) {
        const bool exists = first + lane < kept;
        const uint32_t existing = __ballot_sync(kFullWarp, exists);
        if (exists) {
          const uint16_t row = list[first + lane];
          const uint32_t segment = segment_of(row) - first_segment;
          const uint32_t peers = __match_any_sync(existing, segment);
          const int rank = __popc(peers & lanes_before);
          const uint16_t count = own_counts[segment];
          if (has_places) sorted_[count + rank] = row;
          __syncwarp(existing);
          if (rank == 0) own_counts[segment] = static_cast<uint16_t>(count + __popc(peers));
        }
        __syncwarp();
      }
      if (!has_places) {
        __syncthreads();
        ScanCounts(counts);
      }
    }
    __shared__ int before_of_warps[kFewRowWarps];
    if (kCountsRowsBefore && lane == 0) before_of_warps[warp] = before;
    __syncthreads();
    if (!kCountsRowsBefore) return 0;
    int total = 0;
    for (const int of_warp : before_of_warps) total += of_warp;
    return total;
  }

  __device__ __forceinline__ int count() const { return starts_[own_segments_]; }
  __device__ __forceinline__ int Row(int place) const { return sorted_[place]; }
  // The first place of a segment, numbered within the block.
  __device__ __forceinline__ int Start(int segment) const { return starts_[segment]; }

  // The segment of a place below count(), numbered within the block.
  __device__ __forceinline__ int SegmentOf(int place) const {
    int begin = 0, end = own_segments_;  // the last segment that starts at most here is in [begin, end)
    while (end - begin > 1) {
      const int middle = (begin + end) / 2;
      if (starts_[middle] <= place) {
        begin = middle;
      } else {
        end = middle;
      }
    }
    return begin;
  }

 private:
  // Rows per warp, whole steps of a warp.
  __host__ __device__ int WarpRows() const {
    return static_cast<int>(RoundUp(CeilDivide(rows_, kFewRowWarps), kWarpThreads));
  }
  __host__ __device__ int ListBytes() const { return 2 * kFewRowWarps * WarpRows(); }
  __host__ __device__ int CountBytes() const { return 2 * kFewRowWarps * own_segments_; }

  // Replaces the counts of each warp and segment by the places of their first rows, and writes `starts_`.
  __device__ __forceinline__ void ScanCounts(uint16_t* counts) {
    __shared__ int of_warps[kFewRowWarps];
    const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const int segment = threadIdx.x;
    int total = 0;
    if (segment < own_segments_) {
#pragma unroll
      for (int w = 0; w < kFewRowWarps; ++w) total += counts[w * own_segments_ + segment];
    }
    int sum = total;  // of this segment and those before it in the warp
#pragma unroll
    for (int step = 1; step < kWarpThreads; step *= 2) {
      const int other = __shfl_up_sync(kFullWarp, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == kWarpThreads - 1) of_warps[warp] = sum;
    __syncthreads();
    int place = sum - total;
    for (int w = 0; w < warp; ++w) place += of_warps[w];
    if (segment < own_segments_) {
      starts_[segment] = static_cast<uint16_t>(place);
      if (segment == own_segments_ - 1) starts_[own_segments_] = static_cast<uint16_t>(place + total);
#pragma unroll
      for (int w = 0; w < kFewRowWarps; ++w) {
        uint16_t& of_warp = counts[w * own_segments_ + segment];
        const int count = of_warp;
        of_warp = static_cast<uint16_t>(place);
        place += count;
      }
    }
    __syncthreads();
  }

  int rows_, own_segments_;
  uint16_t *sorted_, *starts_;
};

}  // namespace jax_baracuda::segment
