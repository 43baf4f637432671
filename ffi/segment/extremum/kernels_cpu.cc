// The CPU kernels of segment_max, segment_min, segment_argmax, segment_argmin and their gradients. A minimum is the
// maximum of flipped values: values are flipped when read, results when written.
//
// The gradient visits the rows in order. If it exceeds the caches and the ids are unsorted, it visits them grouped by
// segment and streams them to memory, so that winners and cotangents are read once.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/extremum/arithmetic.h"
#include "ffi/segment/extremum/handler.h"
#include "ffi/segment/extremum/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kMinStreamedRowBytes = 256;

template <typename Format>
struct ArgExtremum {
  using Key = typename Format::Key;
  using Element = Key;
  using First = std::common_type_t<Key, int32_t>;
  using Second = int32_t;
  static constexpr bool kRounds = false, kHoldsRuns = true;

  Format format;
  int32_t no_row;  // result of an empty segment
  int32_t* winner;

  JB_INLINE CellsOf<ArgExtremum> ResultCells() const { return {nullptr, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<ArgExtremum> cells) const {
    std::fill_n(cells.first, count, ArgCell<First>{}.best);
    std::fill_n(cells.second, count, ArgCell<First>{}.row);
  }

  JB_INLINE First KeyOf(Key value) const { return format.WithOneZero(format.template KeyOf<First>(value)); }

  JB_INLINE static void MergeOne(CellsOf<ArgExtremum> cells, int64_t i, First key, int32_t row) {
    ArgCell<First> cell{cells.first[i], cells.second[i]};
    MergeArgCell(cell, key, row);
    cells.first[i] = cell.best;
    cells.second[i] = cell.row;
  }

  JB_INLINE void Fold(const Key* values, int32_t row, int64_t width, CellsOf<ArgExtremum> cells) const {
    if (width == 1 && TakeOne(format, KeyOf(*values), row, *cells.first, *cells.second)) return;
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) MergeOne(cells, i, KeyOf(values[i]), row);
  }

  JB_INLINE void Merge(int64_t count, CellsOf<ArgExtremum> later, CellsOf<ArgExtremum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) MergeOne(cells, i, later.first[i], later.second[i]);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<ArgExtremum> cells) const {
    int32_t* const to = winner + first_cell;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) to[i] = cells.second[i] == kNoWinner ? no_row : cells.second[i];
  }
};

template <typename T>
struct BackwardArrays {
  SegmentIds ids;
  const T* d_output;
  const int32_t* winner;
  const T* data;    // nullptr if ties are not shared
  const T* output;  // likewise
  T* d_data;
  bool d_output_is_shared;
  bool winner_is_shared;
};

// Winners, cotangents and maxima of a batch element, or of one of its segments.
template <typename T>
struct CellRows {
  const T* d_output;
  const int32_t* winner;
  const T* output;  // nullptr if ties are not shared

  JB_INLINE static CellRows OfBatch(const Problem& problem, const BackwardArrays<T>& arrays, int64_t batch) {
    const int64_t first = batch * problem.segments * problem.features;
    const int64_t first_winner = arrays.winner_is_shared ? 0 : first;
    return {arrays.d_output + (arrays.d_output_is_shared ? 0 : first), arrays.winner + first_winner,
            arrays.output == nullptr ? nullptr : arrays.output + first_winner};
  }

  JB_INLINE CellRows OfSegment(int64_t segment, int64_t width) const {
    const int64_t first = segment * width;
    return {d_output + first, winner + first, output == nullptr ? nullptr : output + first};
  }
};

// Writes the gradient of one row; `data` is the row itself, or nullptr if ties are not shared.
template <typename T>
JB_INLINE void GradientOfRow(const CellRows<T> cells, const T* data, int32_t row, int64_t width, T* d_row) {
  int32_t lowest_winner = 0;
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) {
    // Selects bits, which vectorises for 16-bit types too; all bits zero is +0.
    const BitsOf<T> d_output = BitCast<BitsOf<T>>(cells.d_output[i]);
    const BitsOf<T> bits = cells.winner[i] == row ? d_output : BitsOf<T>{0};
    std::memcpy(static_cast<void*>(d_row + i), &bits, sizeof(T));
    lowest_winner = std::min(lowest_winner, cells.winner[i]);
  }
  if (!IsTie(lowest_winner) || data == nullptr) return;
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) {
    const int32_t winner = cells.winner[i];
    if (IsTie(winner) && AreEqual(data[i], cells.output[i])) d_row[i] = TiedShare(winner, cells.d_output[i]);
  }
}

template <typename T>
JB_INLINE const T* DataOfRow(const Problem& problem, const BackwardArrays<T>& arrays, int64_t batch, int64_t row) {
  return arrays.data == nullptr ? nullptr : arrays.data + problem.DataRow(batch, row) * problem.features;
}

template <typename T, typename Width>
JB_INLINE void GradientInOrder(const Problem& problem, int64_t batch, int64_t row_begin, int64_t row_end,
                               const BackwardArrays<T>& arrays, Width width) {
  const CellRows<T> cells = CellRows<T>::OfBatch(problem, arrays, batch);
  const auto prefetch = [&](int64_t segment) __attribute__((always_inline)) {
    PrefetchRow(cells.d_output + segment * width, width);
    PrefetchRow(cells.winner + segment * width, width);
  };
  WriteRowsOfSegments(problem, arrays.ids, batch, row_begin, row_end, width, arrays.d_data, prefetch,
                      [&](int64_t row, int64_t segment, T* d_row) __attribute__((always_inline)) {
                        GradientOfRow(cells.OfSegment(segment, width), DataOfRow(problem, arrays, batch, row),
                                      static_cast<int32_t>(row), width, d_row);
                      });
}

template <typename T>
JB_CPU_CLONES_OF_NARROW void GradientOfNarrowRows(const Problem problem, int64_t batch, int64_t row_begin,
                                                  int64_t row_end, const BackwardArrays<T> arrays) {
  DispatchNarrow(problem.features, [&](auto width) __attribute__((always_inline)) {
    GradientInOrder(problem, batch, row_begin, row_end, arrays, width);
  });
}

template <typename T>
JB_CPU_CLONES void GradientOfWideRows(const Problem problem, int64_t batch, int64_t row_begin, int64_t row_end,
                                      const BackwardArrays<T> arrays) {
  GradientInOrder(problem, batch, row_begin, row_end, arrays, problem.features);
}

// The gradient of the rows of a block of segments. Returns false if allocation fails.
template <typename T>
JB_CPU_CLONES bool GradientGrouped(const Problem problem, const Block block, const GroupedRows& grouped,
                                   const BackwardArrays<T> arrays) {
  const int64_t features = problem.features;
  const CellRows<T> all_cells = CellRows<T>::OfBatch(problem, arrays, block.batch);
  const StreamBuffer<T> buffer(features);
  T* const d_rows = arrays.d_data + block.batch * problem.rows * features;
  if (buffer.At(d_rows) == nullptr) return false;
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    const CellRows<T> cells = all_cells.OfSegment(segment, features);
    const int64_t group = segment - block.segment_begin;
    for (int32_t place = grouped.Begin(group); place < grouped.End(group); ++place) {
      const int32_t row = grouped[place];
      T* const d_row = d_rows + row * features;
      GradientOfRow(cells, DataOfRow(problem, arrays, block.batch, row), row, features, buffer.At(d_row));
      StreamLines(d_row, buffer.At(d_row), features * sizeof(T));
    }
  }
  WriteDroppedRows(problem, block, arrays.ids, arrays.d_data);
  FinishStreaming();
  return true;
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
bool GradientOfAll(ffi::ThreadPool& pool, const Problem& problem, const BackwardArrays<T>& arrays) {
  if (ChooseGradient(problem, sizeof(T)) == Strategy::kStreamedGroups && !EachBatchIsSorted(problem, arrays.ids)) {
    const int64_t total_bytes = problem.batch * problem.rows * problem.features * sizeof(T);
    AdviseHugePages(arrays.d_data, total_bytes);
    const Blocking blocking(problem, /*item_size=*/0, std::max<int64_t>(1, pool.num_threads()));
    return ForEachGroupedBlock(pool, problem, blocking, arrays.ids,
                               [&](const Block& block, const GroupedRows& grouped) {
                                 return GradientGrouped(problem, block, grouped, arrays);
                               });
  }
  ForEachChunkOfRows(pool, problem, arrays.d_data, sizeof(T), [&](int64_t batch, int64_t row_begin, int64_t row_end) {
    if (IsNarrow(problem.features)) {
      GradientOfNarrowRows(problem, batch, row_begin, row_end, arrays);
    } else {
      GradientOfWideRows(problem, batch, row_begin, row_end, arrays);
    }
  });
  return true;
}

int64_t NumCells(const Problem& problem) { return problem.batch * problem.segments * problem.features; }

template <typename Reduction>
bool Reduce(ffi::ThreadPool& pool, const SegmentCall& call, const void* data, const Reduction& reduction) {
  using Key = typename Reduction::Key;
  return ReduceAll(pool, call.problem, SegmentIds(call), DirectRows<Key>{static_cast<const Key*>(data)}, reduction);
}

bool RunExtremum(ffi::ThreadPool& pool, const ExtremumCall& call) {
  bool has_memory = true;
  AdviseHugePages(call.output, NumCells(call.problem) * ElementBytes(call.type));
  DispatchKeys(JB_DISPATCH(DispatchOrdered), call.type, call.is_minimum, [&](auto format) {
    using Reduction = Extremum<decltype(format)>;
    has_memory = Reduce(pool, call, call.data, Reduction{format, static_cast<typename Reduction::Key*>(call.output)});
  });
  return has_memory;
}

bool RunWithWinner(ffi::ThreadPool& pool, const ExtremumCall& call) {
  bool has_memory = true;
  AdviseHugePages(call.output, NumCells(call.problem) * ElementBytes(call.type));
  AdviseHugePages(call.winner, NumCells(call.problem) * sizeof(int32_t));
  DispatchKeys(JB_DISPATCH(DispatchFloating), call.type, call.is_minimum, [&](auto format) {
    using Reduction = ExtremumWithWinner<decltype(format)>;
    auto* const output = static_cast<typename Reduction::Key*>(call.output);
    has_memory = Reduce(pool, call, call.data, Reduction{format, call.first_wins, output, call.winner});
  });
  return has_memory;
}

// The gradients of minima and maxima are the same function of winners and cotangents.
bool RunBackward(ffi::ThreadPool& pool, const ExtremumBackwardCall& call) {
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BackwardArrays<T> arrays{SegmentIds(call),
                                   static_cast<const T*>(call.d_output),
                                   call.winner,
                                   static_cast<const T*>(call.data),
                                   static_cast<const T*>(call.output),
                                   static_cast<T*>(call.d_data),
                                   call.d_output_is_shared,
                                   call.winner_is_shared};
    has_memory = GradientOfAll(pool, call.problem, arrays);
  });
  return has_memory;
}

bool RunArg(ffi::ThreadPool& pool, const ArgCall& call) {
  bool has_memory = true;
  AdviseHugePages(call.row, NumCells(call.problem) * sizeof(int32_t));
  DispatchKeys(JB_DISPATCH(DispatchWide), call.type, call.is_minimum, [&](auto format) {
    const auto no_row = static_cast<int32_t>(call.problem.rows);
    has_memory = Reduce(pool, call, call.data, ArgExtremum<decltype(format)>{format, no_row, call.row});
  });
  return has_memory;
}

template <template <typename> class Reduction, typename Dispatch>
Plan PlanReduction(const SegmentCall& call, const Dispatch& dispatch) {
  return PlanOfType(call, dispatch, [&](auto tag) {
    using Format = decltype(FormatOf<typename decltype(tag)::type>(0));
    return ChooseStrategy<Reduction<Format>>(call.problem, /*has_counts=*/false);
  });
}

Plan PlanExtremum(const ExtremumCall& call) {
  return call.with_winner ? PlanReduction<ExtremumWithWinner>(call, JB_DISPATCH(DispatchFloating))
                          : PlanReduction<Extremum>(call, JB_DISPATCH(DispatchOrdered));
}

Plan PlanArg(const ArgCall& call) { return PlanReduction<ArgExtremum>(call, JB_DISPATCH(DispatchWide)); }

Plan PlanBackward(const ExtremumBackwardCall& call) {
  return {StrategyName(ChooseGradient(call.problem, ElementBytes(call.type)))};
}

constexpr auto kRun = RunOnCpu<ExtremumCall, RunExtremum>;
constexpr auto kRunWithWinner = RunOnCpu<ExtremumCall, RunWithWinner>;
constexpr auto kRunBackward = RunOnCpu<ExtremumBackwardCall, RunBackward>;
constexpr auto kRunArg = RunOnCpu<ArgCall, RunArg>;

constexpr auto kPlan = PlanOf<PlanExtremum, ExtremumCallOf<false>>;
constexpr auto kPlanWithWinner = PlanOf<PlanExtremum, ExtremumCallOf<true>>;
constexpr auto kPlanBackward = PlanOf<PlanBackward, CallOf<ExtremumBackwardCall>>;
constexpr auto kPlanArg = PlanOf<PlanArg, CallOf<ArgCall>>;

#define JB_BIND_REDUCTION (BindCall<ffi::ThreadPool, 2, 1, ReductionOptions>())
#define JB_BIND_WITH_WINNER (BindCall<ffi::ThreadPool, 2, 2, WinnerOptions>())
#define JB_REDUCTION_STRATEGIES kNothing, "scan", "group_by_segment"
#define JB_BACKWARD_STRATEGIES kNothing, "gather", "group_by_segment_streamed"

JB_CPU_TARGET("segment_max", (HandleExtremum<ffi::ThreadPool, kRun, false>), JB_BIND_REDUCTION, kPlan,
              JB_REDUCTION_STRATEGIES);
JB_CPU_TARGET("segment_min", (HandleExtremum<ffi::ThreadPool, kRun, true>), JB_BIND_REDUCTION, kPlan,
              JB_REDUCTION_STRATEGIES);
JB_CPU_TARGET("segment_max_with_winner", (HandleExtremumWithWinner<ffi::ThreadPool, kRunWithWinner, false>),
              JB_BIND_WITH_WINNER, kPlanWithWinner, JB_REDUCTION_STRATEGIES);
JB_CPU_TARGET("segment_min_with_winner", (HandleExtremumWithWinner<ffi::ThreadPool, kRunWithWinner, true>),
              JB_BIND_WITH_WINNER, kPlanWithWinner, JB_REDUCTION_STRATEGIES);
JB_CPU_TARGET("segment_max_backward", (HandleExtremumBackward<ffi::ThreadPool, kRunBackward, false>),
              BindExtremumBackward<ffi::ThreadPool>(), kPlanBackward, JB_BACKWARD_STRATEGIES);
JB_CPU_TARGET("segment_min_backward", (HandleExtremumBackward<ffi::ThreadPool, kRunBackward, true>),
              BindExtremumBackward<ffi::ThreadPool>(), kPlanBackward, JB_BACKWARD_STRATEGIES);
JB_CPU_TARGET("segment_argmax", (HandleArg<ffi::ThreadPool, kRunArg, false>), JB_BIND_REDUCTION, kPlanArg,
              JB_REDUCTION_STRATEGIES);
JB_CPU_TARGET("segment_argmin", (HandleArg<ffi::ThreadPool, kRunArg, true>), JB_BIND_REDUCTION, kPlanArg,
              JB_REDUCTION_STRATEGIES);

}  // namespace
}  // namespace jax_baracuda::segment
