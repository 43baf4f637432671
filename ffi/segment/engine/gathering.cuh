// Rows gathered from another array, with the additional input of their edges.
#pragma once

#include <cstring>

#include "ffi/segment/engine/device.cuh"

namespace jax_baracuda::segment {

// The input that a reduction reads per edge, besides the gathered row.
enum class EdgeInput {
  kNothing,
  kNumber,
  kWeights,  // one per head; scales the row
  kWinners,  // per element of the row: only elements won by this edge take part
  kExtrema,  // likewise: only elements whose extremum equals the segment's own value in `reduced`
};

template <EdgeInput kInput>
inline constexpr bool kSelects = kInput == EdgeInput::kWinners || kInput == EdgeInput::kExtrema;

template <EdgeInput kInput>
inline constexpr bool kTakesNumber = kInput != EdgeInput::kNothing && kInput != EdgeInput::kExtrema;

template <typename Reduction>
inline constexpr EdgeInput kEdgeInput = EdgeInput::kNothing;

// The gathered row, and the number of its edge.
struct SourceRow {
  uint32_t row, edge;
};

// The source of the reduced rows: row i is row gather_ids[i] of an array of `num_rows` rows. Its edge is number i, or
// edge_order[i].
template <typename T>
struct Gathering {
  const int32_t* gather_ids;  // [batch or 1, rows]
  bool gather_ids_are_shared;
  bool clips;  // ids out of range name the nearest row; otherwise their rows are 0
  int64_t num_rows;
  const int32_t* edge_order;  // [batch or 1, rows], or nullptr
  bool edge_order_is_shared;
  const T* weights;  // [batch or 1, rows, heads], or nullptr
  bool weights_are_shared;
  int64_t heads, features_per_head;
  // For each element of the gathered rows: the edge that won it, or its extremum. In the second case an edge won it if
  // its segment has the same value in `reduced`. The batch shares none of these.
  const int32_t* winners;  // [batch, num_rows, features]
  const T* extrema;        // [batch, num_rows, features]
  const T* reduced;        // [batch, segments, features]

  // The same, starting at this batch element.
  Gathering From(int64_t element, int64_t rows, int64_t features) const {
    Gathering from = *this;
    if (!gather_ids_are_shared) from.gather_ids += element * rows;
    if (edge_order != nullptr && !edge_order_is_shared) from.edge_order += element * rows;
    if (weights != nullptr && !weights_are_shared) from.weights += element * rows * heads;
    if (winners != nullptr) from.winners += element * num_rows * features;
    if (extrema != nullptr) from.extrema += element * num_rows * features;
    return from;
  }

  // The source of the row at position `place` of batch element b. Its row is kDropped if the gather id names none.
  template <EdgeInput kInput>
  __device__ __forceinline__ SourceRow Source(int64_t b, int64_t place, int64_t rows, bool data_is_shared) const {
    int64_t id = __ldg(gather_ids + (gather_ids_are_shared ? 0 : b * rows) + place);
    if (clips) id = min(max(id, int64_t{0}), num_rows - 1);
    const bool exists = static_cast<uint64_t>(id) < static_cast<uint64_t>(num_rows);
    SourceRow source{};
    source.row = exists ? static_cast<uint32_t>((data_is_shared ? 0 : b * num_rows) + id) : kDropped;
    if constexpr (kTakesNumber<kInput>) {
      int64_t edge = place;
      if (edge_order != nullptr) {
        edge = __ldg(edge_order + (edge_order_is_shared ? 0 : b * rows) + place);
        edge = min(max(edge, int64_t{0}), rows - 1);  // clamped: an invalid order must not cause reads out of bounds
      }
      const bool is_numbered_through = kInput == EdgeInput::kWeights && !weights_are_shared;
      source.edge = static_cast<uint32_t>((is_numbered_through ? b * rows : 0) + edge);
    }
    return source;
  }
};

// Loads in flight: neighbouring elements of a gathered row, and the input of its edge. Nothing is used before AddTo, so
// several rows can be in flight.
template <typename T, int kVec, EdgeInput kInput>
struct ComingRow {
  Packed<T, kVec> values;
  int32_t number;  // row number, or edge number
  T weight;
  Vector<int32_t, kVec> winners;
  Vector<T, kVec> extrema, reduced;

  // `own_segment` is the row of gathering.reduced; negative if there is none.
  __device__ __forceinline__ void Gather(const Gathering<T>& gathering, const T* data, const SourceRow& source,
                                         int64_t own_segment, int64_t features, int64_t column, int64_t head) {
    const bool exists = source.row != kDropped;
    if (exists) {
      values = LoadPacked<kVec>(data + source.row * features + column);
    } else {
      memset(&values, 0, sizeof(values));
    }
    if constexpr (kInput == EdgeInput::kWeights) {
      const int64_t place = source.edge * gathering.heads + head;
      weight = exists ? __ldg(gathering.weights + place) : static_cast<T>(ComputeType<T>{0});
    }
    if constexpr (kInput == EdgeInput::kWinners) {
      winners = Repeat<kVec>(int32_t{-1});
      if (exists) winners = LoadVector<kVec>(gathering.winners + source.row * features + column);
    }
    if constexpr (kInput == EdgeInput::kExtrema) {
      extrema = Repeat<kVec>(static_cast<T>(ComputeType<T>{0}));
      reduced = Repeat<kVec>(static_cast<T>(ComputeType<T>{1}));
      if (exists && own_segment >= 0) {
        extrema = LoadVector<kVec>(gathering.extrema + source.row * features + column);
        reduced = LoadVector<kVec>(gathering.reduced + own_segment * features + column);
      }
    }
    if constexpr (kInput == EdgeInput::kNumber || kInput == EdgeInput::kWinners) {
      number = static_cast<int32_t>(source.edge);
    }
  }

  template <typename Cells, typename Outputs>
  __device__ __forceinline__ void AddTo(Cells& cells, const Outputs& outputs) const {
    if constexpr (kInput == EdgeInput::kWeights) {
      cells.AddScaled(Unpack<T, kVec>(values), weight);
    } else if constexpr (kSelects<kInput>) {
      uint32_t won = 0;
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        const bool wins = kInput == EdgeInput::kWinners ? winners.lane[k] == number
                                                        : static_cast<ComputeType<T>>(extrema.lane[k]) ==
                                                              static_cast<ComputeType<T>>(reduced.lane[k]);
        won |= static_cast<uint32_t>(wins) << k;
      }
      cells.AddSelected(Unpack<T, kVec>(values), won);
    } else {
      cells.Add(Unpack<T, kVec>(values), number, outputs);
    }
  }
};

}  // namespace jax_baracuda::segment
