// The CPU kernels of segment_max, segment_min, segment_argmax, segment_argmin and their gradients. A minimum is the
// maximum of flipped values: values are flipped when read, results when written.
//
// The gradient visits the rows in order. If it exceeds the caches and the ids are unsorted, it visits them grouped by
// segment and streams them to memory, so that winners and cotangents are read once.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/extremum/arithmetic.h"
#include "ffi/segment/extremum/call.h"
#include "ffi/segment/extremum/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kMinStreamedRowBytes = 256;

// The first row with the greatest key.
template <typename KeyOfCell>
struct ArgOfKeys {
  using Element = KeyOfCell;
  using First = KeyOfCell;
  using Second = int32_t;
  using Narrow = ArgOfKeys;

  JB_INLINE static void MergeOne(CellsOf<ArgOfKeys> cells, int64_t i, First key, int32_t row) {
    ArgCell<First> cell{cells.first[i], cells.second[i]};
    MergeArgCell(cell, key, row);
    cells.first[i] = cell.best;
    cells.second[i] = cell.row;
  }

  JB_INLINE void Fold(const First* keys, int32_t row, int64_t width, CellsOf<ArgOfKeys> cells) const {
    if (width == 1 && *keys != *cells.first) return FoldOne(*keys, row, *cells.first, *cells.second);
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) MergeOne(cells, i, keys[i], row);
  }
};

template <typename Format>
struct ArgExtremum {
  using Key = typename Format::Key;
  using Element = Key;
  using First = std::common_type_t<Key, int32_t>;
  using Second = int32_t;
  using Narrow = ArgOfKeys<First>;
  static constexpr bool kRounds = false, kKeepsRows = true;

  Format format;
  int32_t no_row;  // result of an empty segment
  int32_t* winner;

  JB_INLINE CellsOf<ArgExtremum> ResultCells() const { return {nullptr, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<ArgExtremum> cells) const {
    std::fill_n(cells.first, count, ArgCell<First>{}.best);
    std::fill_n(cells.second, count, ArgCell<First>{}.row);
  }

  JB_INLINE First KeyOf(Key value) const {
    const First key = format.template KeyOf<First>(value);
    return Format::kOfFloating ? WithOneZero(key) : key;
  }

  JB_INLINE void Fold(const Key* values, int32_t row, int64_t width, CellsOf<ArgExtremum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) Narrow::MergeOne(cells, i, KeyOf(values[i]), row);
  }

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const Key* from, int64_t count, First* to) const { ConvertToKeys(*this, from, count, to); }

  JB_INLINE void Merge(int64_t count, CellsOf<ArgExtremum> later, CellsOf<ArgExtremum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) Narrow::MergeOne(cells, i, later.first[i], later.second[i]);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<ArgExtremum> cells) const {
    int32_t* const to = winner + first_cell;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) to[i] = cells.second[i] == kNoWinner ? no_row : cells.second[i];
  }
};

// Writes the gradient of those elements of a row that tie for the extremum. Called for few rows, so that all other code
// needs the type's width only.
template <typename T>
JB_AVX2_CLONES void ShareTies(const BitsOf<T>* d_output, const int32_t* winner, const BitsOf<T>* output,
                              const BitsOf<T>* data, int64_t width, BitsOf<T>* d_row) {
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) {
    const bool attains = AreEqual(BitCast<T>(data[i]), BitCast<T>(output[i]));
    const BitsOf<T> share = BitCast<BitsOf<T>>(TiedShare(winner[i], BitCast<T>(d_output[i])));
    d_row[i] = IsTie(winner[i]) && attains ? share : d_row[i];
  }
}

// The arrays of a batch element. Floating numbers are bits, because the gradient copies them unless they tie.
template <typename Bits>
struct BackwardArrays {
  const Bits* d_output;
  const int32_t* winner;
  const Bits* data;    // nullptr if ties are not shared
  const Bits* output;  // likewise
  Bits* d_data;
  void (*share_ties)(const Bits*, const int32_t*, const Bits*, const Bits*, int64_t, Bits*);

  // Writes the gradient of one row to d_row.
  JB_INLINE void WriteRow(int64_t row, int64_t segment, int64_t width, Bits* d_row) const {
    const Bits* const from = d_output + segment * width;
    const int32_t* const winners = winner + segment * width;
    int32_t lowest_winner = 0;
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      const Bits number = from[i];
      d_row[i] = winners[i] == static_cast<int32_t>(row) ? number : Bits{0};
      lowest_winner = std::min(lowest_winner, winners[i]);
    }
    if (!IsTie(lowest_winner) || data == nullptr) return;
    share_ties(from, winners, output + segment * width, data + row * width, width, d_row);
  }
};

template <typename T>
BackwardArrays<BitsOf<T>> ArraysOfBatch(const ExtremumBackwardCall& call, int64_t batch) {
  const Problem& problem = call.problem;
  const int64_t cells = problem.segments * problem.features;
  using Bits = BitsOf<T>;
  return {call.d_output.Of<Bits>(batch, cells),
          call.winner.Of<int32_t>(batch, cells),
          call.data.Of<Bits>(batch, problem.rows * problem.features),
          call.output.Of<Bits>(batch, cells),
          static_cast<BitsOf<T>*>(call.d_data) + batch * problem.rows * problem.features,
          ShareTies<T>};
}

template <typename Bits, typename Width, typename Write>
JB_INLINE void WriteGradient(const RowBlock& block, int64_t segments, const BackwardArrays<Bits>& arrays, Width width,
                             const Write& write) {
  const auto prefetch = [&](int64_t segment) __attribute__((always_inline)) {
    PrefetchRow(arrays.d_output + segment * width, width);
    PrefetchRow(arrays.winner + segment * width, width);
  };
  WriteRowsOfBlock(block, segments, width, arrays.d_data, prefetch, write);
}

template <typename Bits>
JB_AVX2 void GradientOfNarrowRows(const RowBlock block, int64_t segments, int64_t features,
                                  const BackwardArrays<Bits> arrays) {
  DispatchNarrow(features, [&](auto width) __attribute__((always_inline)) {
    WriteGradient(block, segments, arrays, width,
                  [&](int64_t row, int64_t segment, Bits* d_row)
                      __attribute__((always_inline)) { arrays.WriteRow(row, segment, width, d_row); });
  });
}

// Through `buffer`, if not nullptr, rows are streamed.
template <typename Bits>
JB_AVX2_CLONES void GradientOfWideRows(const RowBlock block, int64_t segments, int64_t features,
                                       const BackwardArrays<Bits> arrays, const StreamBuffer<Bits>* buffer) {
  WriteGradient(block, segments, arrays, features,
                [&](int64_t row, int64_t segment, Bits* d_row) __attribute__((always_inline)) {
                  Bits* const to = buffer == nullptr ? d_row : buffer->At(d_row);
                  arrays.WriteRow(row, segment, features, to);
                  if (buffer != nullptr) StreamLines(d_row, to, features * sizeof(Bits));
                });
}

// The actual strategy also depends on the ids: GradientOfAll gathers if they are sorted.
Strategy ChooseGradient(const Problem& problem, int64_t element_bytes) {
  const int64_t row_bytes = problem.features * element_bytes;
  return row_bytes >= kMinStreamedRowBytes && problem.batch * problem.rows * row_bytes >= kMinStreamedBytes &&
                 problem.segments >= kMinSegmentsPerBlock
             ? Strategy::kStreamedGroups
             : ChooseGather(problem);
}

// Returns false if allocation fails.
template <typename T>
bool GradientOfAll(ffi::ThreadPool& pool, const ExtremumBackwardCall& call) {
  using Bits = BitsOf<T>;
  const Problem& problem = call.problem;
  const SegmentIds ids(call);
  if (ChooseGradient(problem, sizeof(T)) == Strategy::kStreamedGroups && !AreSorted(problem, ids)) {
    WriteDroppedRows(pool, problem, ids, call.d_data, sizeof(T));
    const auto write = [&](const Block& block, const GroupedRows& grouped) {
      const auto arrays = ArraysOfBatch<T>(call, block.batch);
      const StreamBuffer<Bits> buffer(problem.features);
      if (buffer.At(arrays.d_data) == nullptr) return false;
      grouped.ForEachBlock(
          0, block.segment_end - block.segment_begin, block.segment_begin, kConvertedIds,
          [&](const RowBlock& rows) { GradientOfWideRows(rows, problem.segments, problem.features, arrays, &buffer); });
      FinishStreaming();
      return true;
    };
    return ForEachGroupedBlock(pool, problem, /*item_size=*/0, NumThreadsOf(pool), ids, write);
  }
  ForEachBlockOfResult(pool, problem, ids, sizeof(T), kConvertedIds, [&](int64_t batch, const RowBlock& block) {
    const auto arrays = ArraysOfBatch<T>(call, batch);
    if (IsNarrow(problem.features)) {
      GradientOfNarrowRows(block, problem.segments, problem.features, arrays);
    } else {
      GradientOfWideRows<Bits>(block, problem.segments, problem.features, arrays, nullptr);
    }
  });
  return true;
}

template <typename T>
using ArgExtremumOf = ArgExtremum<FormatOfType<T>>;

}  // namespace

std::vector<const char*> ExtremumCall::Strategies(bool) { return ExactStrategies(); }

Plan ExtremumCall::MakePlan() const {
  return with_winner ? PlanReduction<ExtremumWithWinnerOf>(*this, JB_DISPATCH(DispatchFloating))
                     : PlanReduction<ExtremumOf>(*this, JB_DISPATCH(DispatchOrdered));
}

bool ExtremumCall::Run(ffi::ThreadPool& pool) const {
  if (with_winner) {
    return DispatchKeys(JB_DISPATCH(DispatchFloating), type, is_minimum, [&](auto format) {
      auto* const keys = static_cast<typename decltype(format)::Key*>(output);
      return ReduceRows(pool, *this, data, ExtremumWithWinner<decltype(format)>{format, first_wins, keys, winner});
    });
  }
  return DispatchKeys(JB_DISPATCH(DispatchOrdered), type, is_minimum, [&](auto format) {
    auto* const keys = static_cast<typename decltype(format)::Key*>(output);
    return ReduceRows(pool, *this, data, Extremum<decltype(format)>{format, keys});
  });
}

std::vector<const char*> ExtremumBackwardCall::Strategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kGather, Strategy::kStreamedGroups);
}

Plan ExtremumBackwardCall::MakePlan() const {
  return {NameOf(kStrategyNames, ChooseGradient(problem, ElementBytes(type)))};
}

// The gradients of minima and maxima are the same function of winners and cotangents.
bool ExtremumBackwardCall::Run(ffi::ThreadPool& pool) const {
  return DispatchOr(true, type, JB_DISPATCH(DispatchFloating),
                    [&](auto tag) { return GradientOfAll<typename decltype(tag)::type>(pool, *this); });
}

std::vector<const char*> ArgCall::Strategies() { return ExactStrategies(); }

Plan ArgCall::MakePlan() const { return PlanReduction<ArgExtremumOf>(*this, JB_DISPATCH(DispatchWide)); }

bool ArgCall::Run(ffi::ThreadPool& pool) const {
  return DispatchKeys(JB_DISPATCH(DispatchWide), type, is_minimum, [&](auto format) {
    const auto no_row = static_cast<int32_t>(problem.rows);
    return ReduceRows(pool, *this, data, ArgExtremum<decltype(format)>{format, no_row, row});
  });
}

}  // namespace jax_baracuda::segment
