// Rows gathered by edges from another array.
//
// How an edge's row takes part in the reduction is an Input, a policy that the op owns. Its objects are passed to
// kernels by value. An Input derives from Edges and has
//
//   kNeedsEdges                         whether Row::Load needs the number of the edge
//   kSharesLanes                        whether Prepare shuffles, so that all lanes of a warp have to call it together;
//                                       Edges says no
//   Advance(element, edges, features)   starts at this batch element; Edges has it for inputs without other arrays
//   At(b, edges, column)                what a thread computes once, before it loads rows: an int64_t for batch element
//                                       b and the features from `column` on; Edges has it for inputs that need none
//   template <int kVec> Row             loads in flight: kVec elements of a gathered row and the input of its edge
//     Load(input, data, source, place)     starts the loads
//     Prepare(outputs, column)             computes what does not depend on the accumulator, for all rows in flight; reads
//                                          no address that Load has set, since rows past the end are not loaded
//     AddTo(cells, outputs)                folds them into an accumulator (see reduction.cuh)
//
// A Row uses nothing that it loads before Prepare, so that several can be in flight.
#pragma once

#include "ffi/segment/engine/device.cuh"

namespace jax_baracuda::segment {

// The gathered row, and the number of its edge in its batch element.
struct SourceRow {
  uint32_t row, edge;
};

// Where a Row is loaded from and what it is added to.
struct RowPlace {
  int64_t segment;  // of the edge, numbered over the whole batch; negative if it has none
  int64_t features, column;
  int64_t at;  // the result of At
};

// The edges of a call. The edge at position i reads row gather_ids[i]. It is number i, or edge_order[i].
struct Edges {
  static constexpr bool kSharesLanes = false;

  const int32_t* gather_ids;  // [batch or 1, edges]
  bool gather_ids_are_shared;
  bool clips;  // ids out of range name the nearest row; otherwise their rows are 0
  int64_t num_rows;
  const int32_t* edge_order;  // [batch or 1, edges], or nullptr
  bool edge_order_is_shared;

  void Advance(int64_t element, int64_t edges, int64_t /*features*/) {
    if (!gather_ids_are_shared) gather_ids += element * edges;
    if (edge_order != nullptr && !edge_order_is_shared) edge_order += element * edges;
  }

  __device__ __forceinline__ int64_t At(int64_t, int64_t, int64_t) const { return 0; }

  // The source of the edge at position `place` of batch element b. Its row is kDropped if the gather id names none.
  template <bool kNeedsEdges>
  __device__ __forceinline__ SourceRow Source(int64_t b, int64_t place, int64_t edges, bool data_is_shared) const {
    int64_t id = __ldg(gather_ids + (gather_ids_are_shared ? 0 : b * edges) + place);
    if (clips) id = min(max(id, int64_t{0}), num_rows - 1);
    const bool exists = static_cast<uint64_t>(id) < static_cast<uint64_t>(num_rows);
    SourceRow source{};
    source.row = exists ? static_cast<uint32_t>((data_is_shared ? 0 : b * num_rows) + id) : kDropped;
    if constexpr (kNeedsEdges) {
      int64_t edge = place;
      if (edge_order != nullptr) {
        edge = __ldg(edge_order + (edge_order_is_shared ? 0 : b * edges) + place);
        edge = min(max(edge, int64_t{0}), edges - 1);  // clamped: an invalid order must not cause reads out of bounds
      }
      source.edge = static_cast<uint32_t>(edge);
    }
    return source;
  }
};

// A row on its way to an accumulator: neighbouring elements, and the number of the row or of its edge.
template <typename T, int kVec>
struct RowInFlight {
  Packed<T, kVec> values;
  int32_t number;

  __device__ __forceinline__ void LoadGathered(const T* data, const SourceRow& source, const RowPlace& place) {
    if (source.row != kDropped) {
      values = LoadPacked<kVec>(data + place.column + FirstElement(source.row, place.features));
    } else {
      values = Packed<T, kVec>{};  // not memset, after which compilers split 16-bit elements and wait for the load
    }
  }
  template <typename Outputs>
  __device__ __forceinline__ void Prepare(const Outputs&, int64_t /*column*/) {}
  template <typename Cells, typename Outputs>
  __device__ __forceinline__ void AddTo(Cells& cells, const Outputs& outputs) const {
    cells.Add(Unpack<T, kVec>(values), number, outputs);
  }
};

// The Input of reductions that need no more than the gathered rows, and with kNeedsEdges the numbers of their edges.
template <typename T, bool kNeedsNumbers = false>
struct GatheredRows : Edges {
  static constexpr bool kNeedsEdges = kNeedsNumbers;

  template <int kVec>
  struct Row : RowInFlight<T, kVec> {
    __device__ __forceinline__ void Load(const GatheredRows&, const T* data, const SourceRow& source,
                                         const RowPlace& place) {
      this->LoadGathered(data, source, place);
      this->number = static_cast<int32_t>(source.edge);
    }
  };
};

}  // namespace jax_baracuda::segment
