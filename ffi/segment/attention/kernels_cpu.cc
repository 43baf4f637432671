// The CPU kernels of attention over edges and its gradients.
//
// A chunk of work is a range of segments with all of their edges. Edges are computed in blocks: first all logits of a
// block, then all exponentials, which vectorise over edges and heads, then the sums. A block has several segments if
// rows are narrow, or a part of the edges of one. Parts have sums of their own, which are merged into those of the
// segment. This keeps rounding errors small in segments of many edges. Only a segment that fits in no block is cut, into
// blocks of its own, so results do not depend on the number of chunks.
//
// The three passes (forward, gradients by segment and by row) differ in their sums, and in whether the rows of an
// operand belong to the segments or are gathered.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "ffi/core/alignment.h"
#include "ffi/core/exp_cpu.h"
#include "ffi/segment/attention/arithmetic.h"
#include "ffi/segment/attention/call.h"
#include "ffi/segment/engine/gathered_rows_cpu.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kMaxBlockEdges = 32;
constexpr int64_t kBlockNumbers = 4096;        // of the rows of a block, so that they stay in the L1 cache
constexpr int64_t kPackedNumbers = 512;        // no other segment joins so many: prefetches would come in bursts
constexpr int64_t kEdgePrefetchDistance = 16;  // in edges

enum class Pass { kForward, kBySegment, kByRow };

// The operands that have rows [heads, features of a head].
enum Operand { kQuery, kKey, kValue, kDOutput };
constexpr int kOperands = 4;

// Whether the rows of an operand belong to the segments of edges; otherwise edges gather them.
constexpr bool BelongsToSegments(Pass pass, int operand) {
  return (operand == kQuery || operand == kDOutput) == (pass != Pass::kByRow);
}

// ---------------------------------------------------------------------------------------------------------------------
// The arithmetic of a block of edges.

// What segments, or some of their edges, add up: the sums of rows, and the softmax of each head.
template <typename C>
struct SegmentStates {
  C *first_sums, *second_sums;  // [states, heads, features of a head]
  C *maxima, *totals;           // [states, heads]

  SegmentStates At(int64_t index, int64_t heads, int64_t features) const {
    return {first_sums + index * features, second_sums + index * features, maxima + index * heads,
            totals + index * heads};
  }
};

// The softmax of the queries [segments or rows, heads], for gradients.
template <typename C>
struct Softmax {
  const C *maxima, *totals, *means;
};

// A run of edges belongs to one segment.
template <typename C>
struct EdgeBlock {
  int64_t heads, head_features;
  int64_t count = 0, runs = 0;
  int64_t run_begins[kMaxBlockEdges + 1];
  const C* rows[kOperands][kMaxBlockEdges];
  int64_t first_heads[kMaxBlockEdges];  // where the softmax of the query begins
  int64_t segments[kMaxBlockEdges], edges[kMaxBlockEdges];
};

// Calls body with the number: a constant, once body is inlined, if it is among kKnown. Doubles are too rare to compile
// them for each constant.
template <typename C, int64_t... kKnown, typename Body>
JB_INLINE void WithConstant(int64_t number, const Body& body) {
  if constexpr (std::is_same_v<C, float>) {
    if (DispatchConstant<kKnown...>(number, body)) return;
  }
  body(number);
}

template <typename C, typename Body>
JB_INLINE void WithHeadFeatures(int64_t head_features, const Body& body) {
  WithConstant<C, 1, 4, 8, 16, 32>(head_features, body);
}

template <typename C, typename Body>
JB_INLINE void WithHeads(int64_t heads, const Body& body) {
  WithConstant<C, 1, 2, 3, 4, 8>(heads, body);
}

// The sum of kCount numbers, a power of two. Each half has an array of its own, which the compiler keeps in a register.
template <int kCount, typename C>
JB_INLINE C SumInPairs(const C* numbers) {
  if constexpr (kCount == 1) {
    return numbers[0];
  } else {
    C sums[kCount / 2];
    JB_VECTORIZE
    for (int k = 0; k < kCount / 2; ++k) sums[k] = numbers[k] + numbers[k + kCount / 2];
    return SumInPairs<kCount / 2>(static_cast<const C*>(sums));
  }
}

// The sum of term(i) for i below `count`, a multiple of kLanes: partial sums, so that it vectorises.
template <int kLanes, typename C, typename Term>
JB_INLINE C SumInLanes(int64_t count, const Term& term) {
  C sums[kLanes];
  JB_VECTORIZE
  for (int k = 0; k < kLanes; ++k) sums[k] = term(k);
  for (int64_t i = kLanes; i < count; i += kLanes) {
    JB_VECTORIZE
    for (int k = 0; k < kLanes; ++k) sums[k] += term(i + k);
  }
  return SumInPairs<kLanes>(static_cast<const C*>(sums));
}

template <typename C, int kLanes = 16, typename Term>
JB_INLINE C SumOfHead(int64_t count, const Term& term) {
  if constexpr (kLanes > 1) {
    if (count < kLanes) return SumOfHead<C, kLanes / 2>(count, term);
  }
  const int64_t done = count / kLanes * kLanes;
  C sum = done == 0 ? C{0} : SumInLanes<kLanes, C>(done, term);
  for (int64_t i = done; i < count; ++i) sum += term(i);
  return sum;
}

// Adds the scores of rows `x` and `y` of the edges to `logits` [edges, heads].
template <typename Score, typename C>
JB_CPU_CLONES void AddScores(const Score score, const EdgeBlock<C>& block, Operand x, Operand y, const C* score_weights,
                             C* logits) {
  WithHeadFeatures<C>(block.head_features, [&](int64_t width) __attribute__((always_inline)) {
    for (int64_t e = 0; e < block.count; ++e) {
      const C *of_x = block.rows[x][e], *of_y = block.rows[y][e];
      for (int64_t head = 0; head < block.heads; ++head) {
        const int64_t first = head * width;
        const C sum = SumOfHead<C>(width, [&](int64_t i) __attribute__((always_inline)) {
          const C weight = Score::kIsAdditive ? score_weights[first + i] : C{0};
          return score.Term(of_x[first + i], of_y[first + i], weight);
        });
        logits[e * block.heads + head] += score.Logit(sum);
      }
    }
  });
}

// Calls body(e * heads + head, e, head) for the heads of the edges [begin, end).
template <typename Body>
JB_INLINE void ForEachHead(int64_t begin, int64_t end, int64_t heads, const Body& body) {
  for (int64_t e = begin; e < end; ++e) {
    JB_VECTORIZE
    for (int64_t head = 0; head < heads; ++head) body(e * heads + head, e, head);
  }
}

// Adds the rows of each run, times scale * factors [edges, heads], to its sums [runs, heads, features of a head].
template <typename C>
JB_CPU_CLONES void AddRows(const C* const* rows, const EdgeBlock<C>& block, C scale, const C* factors,
                           C* sums_of_runs) {
  const int64_t heads = block.heads;
  WithHeadFeatures<C>(block.head_features, [&](int64_t width) __attribute__((always_inline)) {
    for (int64_t run = 0; run < block.runs; ++run) {
      C* const sums_of_run = sums_of_runs + run * heads * width;
      for (int64_t e = block.run_begins[run]; e < block.run_begins[run + 1]; ++e) {
        for (int64_t head = 0; head < heads; ++head) {
          const C factor = scale * factors[e * heads + head];
          const C* const row = rows[e] + head * width;
          C* const sums = sums_of_run + head * width;
          JB_VECTORIZE
          for (int64_t i = 0; i < width; ++i) sums[i] += factor * row[i];
        }
      }
    }
  });
}

// Adds, times factors [edges, heads], the derivatives of additive scores to the sums [runs, heads, features of a head]:
// to the first those by the features of the query, which are those by the features of the key; if kOfWeights, to the
// second those by the score weights.
template <bool kOfWeights, typename C>
JB_CPU_CLONES void AddScoreDerivatives(const AdditiveScore<C> score, const EdgeBlock<C>& block, const C* score_weights,
                                       const C* factors, C* first_sums, C* second_sums) {
  const int64_t heads = block.heads;
  WithHeadFeatures<C>(block.head_features, [&](int64_t width) __attribute__((always_inline)) {
    for (int64_t run = 0; run < block.runs; ++run) {
      ForEachHead(block.run_begins[run], block.run_begins[run + 1], heads,
                  [&](int64_t at, int64_t e, int64_t head) __attribute__((always_inline)) {
                    const int64_t first = head * width, first_sum = run * heads * width + first;
                    const C factor = factors[at];
                    const C *query = block.rows[kQuery][e] + first, *key = block.rows[kKey][e] + first;
                    const C* const weights = score_weights + first;
                    C *by_query = first_sums + first_sum, *by_weight = second_sums + first_sum;
                    JB_VECTORIZE
                    for (int64_t i = 0; i < width; ++i) {
                      by_query[i] += factor * score.ByQuery(query[i], key[i], weights[i]);
                      if constexpr (kOfWeights) by_weight[i] += factor * score.Leaky(query[i] + key[i]);
                    }
                  });
    }
  });
}

template <typename C>
JB_INLINE void ExpEach(int64_t count, C* numbers) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) numbers[i] = Exp(numbers[i]);
}

// Replaces `logits` [edges, heads] by exp(logit - maximum of the run), and sets the maxima and totals of the runs.
template <typename C>
JB_CPU_CLONES void ExpOfRuns(const EdgeBlock<C>& block, C* logits, C* maxima_of_runs, C* totals_of_runs) {
  WithHeads<C>(block.heads, [&](int64_t heads) __attribute__((always_inline)) {
    for (int64_t run = 0; run < block.runs; ++run) {
      const int64_t begin = block.run_begins[run], end = block.run_begins[run + 1];
      C* const maxima = maxima_of_runs + run * heads;
      std::fill_n(maxima, heads, kLowestLogit<C>);
      // This comparison drops a NaN, but the total keeps it.
      ForEachHead(begin, end, heads, [&](int64_t at, int64_t, int64_t head) __attribute__((always_inline)) {
        maxima[head] = logits[at] > maxima[head] ? logits[at] : maxima[head];
      });
      ForEachHead(begin, end, heads, [&](int64_t at, int64_t, int64_t head) __attribute__((always_inline)) {
        logits[at] -= maxima[head];
      });
    }
    ExpEach(block.count * heads, logits);
    for (int64_t run = 0; run < block.runs; ++run) {
      C* const totals = totals_of_runs + run * heads;
      std::fill_n(totals, heads, C{0});
      ForEachHead(block.run_begins[run], block.run_begins[run + 1], heads,
                  [&](int64_t at, int64_t, int64_t head)
                      __attribute__((always_inline)) { totals[head] += logits[at]; });
    }
  });
}

// Writes the probabilities of `logits` [edges, heads], and replaces the logits by the negative means.
template <typename C>
JB_CPU_CLONES void WriteProbabilities(const EdgeBlock<C>& block, const Softmax<C> softmax, C* logits,
                                      C* probabilities) {
  WithHeads<C>(block.heads, [&](int64_t heads) __attribute__((always_inline)) {
    ForEachHead(0, block.count, heads, [&](int64_t at, int64_t e, int64_t head) __attribute__((always_inline)) {
      const C distance = logits[at] - softmax.maxima[block.first_heads[e] + head];
      probabilities[at] = distance > C{0} ? C{0} : distance;  // the maximum may have been rounded otherwise
    });
    ExpEach(block.count * heads, probabilities);
    ForEachHead(0, block.count, heads, [&](int64_t at, int64_t e, int64_t head) __attribute__((always_inline)) {
      const int64_t cell = block.first_heads[e] + head;
      probabilities[at] *= InverseTotal(softmax.totals[cell]);
      logits[at] = -softmax.means[cell];
    });
  });
}

// Merges the state of later edges into `state`.
template <typename C>
JB_CPU_CLONES void MergeStates(int64_t heads, int64_t head_features, const SegmentStates<C>& later,
                               const SegmentStates<C>& state) {
  for (int64_t head = 0; head < heads; ++head) {
    const C largest = std::max(state.maxima[head], later.maxima[head]);
    const C shrinkage = Exp(state.maxima[head] - largest), of_later = Exp(later.maxima[head] - largest);
    state.maxima[head] = largest;
    state.totals[head] = state.totals[head] * shrinkage + later.totals[head] * of_later;
    C* const sums = state.first_sums + head * head_features;
    const C* const later_sums = later.first_sums + head * head_features;
    JB_VECTORIZE
    for (int64_t i = 0; i < head_features; ++i) sums[i] = sums[i] * shrinkage + later_sums[i] * of_later;
  }
}

template <typename C>
JB_CPU_CLONES void DivideByTotals(int64_t heads, int64_t head_features, const C* totals, C* sums) {
  for (int64_t head = 0; head < heads; ++head, sums += head_features) {
    const C inverse = InverseTotal(totals[head]);
    JB_VECTORIZE
    for (int64_t i = 0; i < head_features; ++i) sums[i] *= inverse;
  }
}

template <typename C>
JB_CPU_CLONES void AddSums(int64_t features, const C* later, C* sums) {
  JB_VECTORIZE
  for (int64_t i = 0; i < features; ++i) sums[i] += later[i];
}

// ---------------------------------------------------------------------------------------------------------------------
// The passes, for a chunk of segments.

// Rows of any element type whose ComputeType is C, so that the passes are compiled once for all of them.
template <typename C>
struct RowType {
  int64_t element_bytes;
  void (*widen)(const void* row, int64_t count, C* to);  // nullptr if rows hold C
  void (*narrow)(const C* numbers, int64_t count, void* row);
};

template <typename T, typename C = ComputeType<T>>
RowType<C> RowTypeOf() {
  const auto widen = [](const void* row, int64_t count, C* to) { Widen(static_cast<const T*>(row), count, to); };
  const auto narrow = [](const C* numbers, int64_t count, void* row) { Narrow(numbers, count, static_cast<T*>(row)); };
  return {sizeof(T), std::is_same_v<T, C> ? nullptr : +widen, narrow};
}

// The results of a call; those that a pass does not have are nullptr.
struct Results {
  void *first = nullptr, *second = nullptr;  // rows: the first and the second sums of segments
  void* d_score_weights = nullptr;           // the second sums
  void *maxima = nullptr, *totals = nullptr;
  void* d_bias = nullptr;
};

JB_INLINE bool IsBelow(int64_t id, int64_t count) { return static_cast<uint64_t>(id) < static_cast<uint64_t>(count); }

// Where a chunk begins: at the first edge of this segment, or of a later one if it has none.
struct ChunkBorder {
  int64_t place, segment;
};

// Finds borders [chunks + 1] at equal distances in edges, moved to the next beginning of a segment. Chunks share no
// segment, even if the ids are not sorted.
void FindBorders(const SegmentCall& call, int64_t first_id, int64_t edges, int64_t chunks, ChunkBorder* borders) {
  const SegmentIds ids(call);
  const int64_t segments = call.problem.segments;
  const auto is_member = [&](int64_t place) { return IsBelow(ids[first_id + place], segments); };
  ChunkBorder border{0, 0};
  borders[0] = border;
  for (int64_t chunk = 1; chunk < chunks; ++chunk) {
    int64_t place = ChunkBegin(edges, chunks, chunk);
    if (place > border.place) {
      int64_t previous = place - 1;
      while (previous > border.place && !is_member(previous)) --previous;
      const int64_t of_previous = ids[first_id + previous];
      while (place < edges && (!is_member(place) || ids[first_id + place] == of_previous)) ++place;
      border = {place, place == edges ? segments : std::max(border.segment, ids[first_id + place])};
    }
    borders[chunk] = border;
  }
  borders[chunks] = {edges, segments};
}

template <typename C, Pass kPass>
class AttentionPass {
 public:
  AttentionPass(const AttentionCall& call, int64_t b, const RowType<C>& row_type, const Results& results)
      : call_(call),
        row_type_(row_type),
        num_heads_(call.heads),
        features_(call.problem.features),
        row_bytes_(features_ * row_type.element_bytes),
        segments_(call.problem.segments),
        num_rows_(call.num_rows),
        block_edges_(std::clamp<int64_t>(kBlockNumbers / std::max<int64_t>(1, features_), 1, kMaxBlockEdges)),
        rows_exceed_cache_(ExceedsNearCache((segments_ + num_rows_) * features_, row_type.element_bytes)),
        first_id_(call.problem.IdIndex(b, 0)),
        ids_(call),
        gather_ids_(call.gather_ids.Of<int32_t>(b, call.problem.rows)),
        numbers_(call.edge_order.Of<int32_t>(b, call.problem.rows), call.problem.rows),
        rows_of_edges_(call.rows_of_edges.Of<int32_t>(b, call.problem.rows)),
        bias_(call.bias.Of<C>(b, call.problem.rows * num_heads_)) {
    block_.heads = num_heads_;
    block_.head_features = call.head_features;
    const BatchOperand* const operands[kOperands] = {&call.query, &call.key, &call.value, &call.d_output};
    for (int operand = 0; operand < kOperands; ++operand) {
      const int64_t rows = BelongsToSegments(kPass, operand) ? segments_ : num_rows_;
      operands_[operand] = operands[operand]->Of<char>(b, rows * row_bytes_);
    }
    if (call.score == ScoreKind::kAdditive) operands_[kValue] = nullptr;  // keys are values
    const int64_t queries = BelongsToSegments(kPass, kQuery) ? segments_ : num_rows_, size = queries * num_heads_;
    softmax_ = {call.maxima.Of<C>(b, size), call.totals.Of<C>(b, size), call.means.Of<C>(b, size)};
    const auto result = [&](void* array, int64_t count) {
      return array == nullptr ? nullptr : static_cast<char*>(array) + b * count;
    };
    first_ = result(results.first, segments_ * row_bytes_);
    second_ = result(results.second, segments_ * row_bytes_);
    const auto numbers = [&](void* array, int64_t count) {
      return reinterpret_cast<C*>(result(array, count * sizeof(C)));
    };
    d_score_weights_ = numbers(results.d_score_weights, segments_ * features_);
    maxima_ = numbers(results.maxima, segments_ * num_heads_);
    totals_ = numbers(results.totals, segments_ * num_heads_);
    d_bias_ = numbers(results.d_bias, call.problem.rows * num_heads_);
    memory_ = Allocate<C>(PlaceAll(nullptr));
    if (memory_ == nullptr) return;
    PlaceAll(memory_.get());
    WriteZeros(empty_.first_sums, features_);
    WriteZeros(empty_.second_sums, features_);
    std::fill_n(empty_.maxima, num_heads_, kLowestLogit<C>);
    std::fill_n(empty_.totals, num_heads_, C{0});
    if (call.score == ScoreKind::kAdditive) {
      score_weights_ = NumbersOf(call.score_weights.Of<char>(b, row_bytes_), widened_weights_);
    }
  }

  bool has_memory() const { return memory_ != nullptr; }

  // Dropped edges may stand between those of a segment. If the ids are not sorted, edges of earlier segments are dropped.
  void Run(ChunkBorder begin, ChunkBorder end) {
    int64_t segment_of_last = -1, next_segment = begin.segment;
    for (int64_t place = begin.place; place < end.place; ++place) {
      const int64_t upcoming = place + kEdgePrefetchDistance, segment = ids_[first_id_ + place];
      if (upcoming < end.place) Prefetch(NearestRow(gather_ids_[upcoming], num_rows_), numbers_[upcoming]);
      if (!IsBelow(segment, end.segment) || (segment < next_segment && segment != segment_of_last)) continue;
      if (kPass == Pass::kByRow && !IsBelow(gather_ids_[place], num_rows_)) continue;
      if (segment != segment_of_last) {
        while (next_segment < segment) Finish(next_segment++, empty_);
        segment_of_last = next_segment++;
        if (!Fits(place, end.place)) Fold();
      }
      Add(segment, NearestRow(gather_ids_[place], num_rows_), numbers_[place]);
      if (block_.count == block_edges_) Fold();
    }
    Fold();
    FinishCarried();
    while (next_segment < end.segment) Finish(next_segment++, empty_);
    if (kPass == Pass::kByRow && call_.score == ScoreKind::kGiven) RunRowless(begin, end);
  }

 private:
  static constexpr int64_t kLine = kCacheLine / sizeof(C);

  // A row as numbers: in place, or widened into `memory`.
  JB_INLINE const C* NumbersOf(const char* row, C* memory) const {
    if (row_type_.widen == nullptr) return reinterpret_cast<const C*>(row);
    row_type_.widen(row, features_, memory);
    return memory;
  }

  // The last edges may belong to no segment. The gradients of their logits take the values of other rows.
  void RunRowless(ChunkBorder begin, ChunkBorder end) {
    for (int64_t place = end.place; place > begin.place && !IsBelow(ids_[first_id_ + place - 1], segments_); --place) {
      const int64_t row = gather_ids_[place - 1], edge = numbers_[place - 1];
      if (!IsBelow(row, num_rows_)) continue;
      Add(NearestRow(rows_of_edges_[edge], segments_), row, edge);
      if (block_.count == block_edges_) Compute();
    }
    Compute();
  }

  // Places all arrays in `memory`, and returns how many numbers they have.
  int64_t PlaceAll(C* memory) {
    C* next = memory;
    const auto take = [&](int64_t count) {
      C* const array = next;
      next += RoundUp(count, kLine);
      return array;
    };
    const auto place_states = [&](int64_t count) {
      return SegmentStates<C>{take(count * features_), take(count * features_), take(count * num_heads_),
                              take(count * num_heads_)};
    };
    logits_ = take(block_edges_ * num_heads_);
    probabilities_ = take(block_edges_ * num_heads_);
    widened_weights_ = take(features_);
    for (C*& rows : widened_) rows = take(row_type_.widen == nullptr ? 0 : block_edges_ * features_);
    of_runs_ = place_states(block_edges_);
    carry_ = place_states(1);
    empty_ = place_states(1);
    return next - memory;
  }

  // Whether the segment that begins at `place` joins those of the block, because the rest has room for it.
  bool Fits(int64_t place, int64_t end) const {
    const auto id = [&](int64_t i) { return ids_[first_id_ + i]; };
    const int64_t segment = id(place);
    if (block_.count * features_ >= kPackedNumbers) return false;
    int64_t room = block_edges_ - block_.count;
    if (place + room >= end || (id(place + room) != segment && IsBelow(id(place + room), segments_))) return true;
    for (; place < end; ++place) {  // there may be dropped edges
      if (id(place) == segment && room-- == 0) return false;
      if (id(place) != segment && IsBelow(id(place), segments_)) break;
    }
    return true;
  }

  // Calls body with each operand that the call has, as a constant.
  template <typename Body>
  JB_INLINE void ForEachOperand(const Body& body) const {
    if (operands_[kQuery] != nullptr) body(std::integral_constant<int, kQuery>{});
    if (operands_[kKey] != nullptr) body(std::integral_constant<int, kKey>{});
    if (operands_[kValue] != nullptr) body(std::integral_constant<int, kValue>{});
    if (kPass != Pass::kForward) body(std::integral_constant<int, kDOutput>{});
  }

  JB_INLINE void Prefetch(int64_t row, int64_t edge) const {
    if (rows_exceed_cache_) {
      ForEachOperand([&](auto operand) __attribute__((always_inline)) {
        if (!BelongsToSegments(kPass, operand)) PrefetchRow(operands_[operand] + row * row_bytes_, row_bytes_);
      });
    }
    if constexpr (kPass == Pass::kByRow) {
      for (const C* array : {softmax_.maxima, softmax_.totals, softmax_.means}) {
        __builtin_prefetch(array + row * num_heads_);
      }
    }
    if (bias_ != nullptr) __builtin_prefetch(bias_ + edge * num_heads_);
  }

  // Adds an edge to the block, which is not full.
  JB_INLINE void Add(int64_t segment, int64_t row, int64_t edge) {
    const int64_t e = block_.count++;
    const bool begins_run = e == 0 || segment != block_.segments[e - 1];
    if (begins_run) block_.run_begins[block_.runs++] = e;
    ForEachOperand([&](auto operand) __attribute__((always_inline)) {
      constexpr bool kOfSegment = BelongsToSegments(kPass, operand);
      const C** const rows = block_.rows[operand];
      rows[e] = kOfSegment && !begins_run ? rows[e - 1]
                                          : NumbersOf(operands_[operand] + (kOfSegment ? segment : row) * row_bytes_,
                                                      widened_[operand] + e * features_);
    });
    block_.first_heads[e] = (BelongsToSegments(kPass, kQuery) ? segment : row) * num_heads_;
    block_.segments[e] = segment;
    block_.edges[e] = edge;
    C* const logits = logits_ + e * num_heads_;
    if (bias_ == nullptr) {
      std::fill_n(logits, num_heads_, C{0});
    } else {
      std::copy_n(bias_ + edge * num_heads_, num_heads_, logits);
    }
  }

  // Computes the states of the runs of the block, and empties it. Returns the number of runs.
  int64_t Compute() {
    const int64_t runs = block_.runs;
    block_.run_begins[runs] = block_.count;
    WriteZeros(of_runs_.first_sums, runs * features_);
    if (call_.score == ScoreKind::kAdditive) std::copy_n(block_.rows[kKey], block_.count, block_.rows[kValue]);
    DispatchScore<C, true>(call_, [&](auto score) {
      if constexpr (!decltype(score)::kIsGiven) AddScores(score, block_, kQuery, kKey, score_weights_, logits_);
    });
    if (kPass == Pass::kForward) {
      ExpOfRuns(block_, logits_, of_runs_.maxima, of_runs_.totals);
      AddRows<C>(block_.rows[kValue], block_, C{1}, logits_, of_runs_.first_sums);
    } else {
      WriteProbabilities(block_, softmax_, logits_, probabilities_);
      AddScores(DotScore<C>{1}, block_, kDOutput, kValue, score_weights_, logits_);
      for (int64_t i = 0; i < block_.count * num_heads_; ++i) logits_[i] *= probabilities_[i];
      AddGradients();
    }
    for (int64_t e = 0; d_bias_ != nullptr && e < block_.count; ++e) {
      std::copy_n(logits_ + e * num_heads_, num_heads_, d_bias_ + block_.edges[e] * num_heads_);
    }
    block_.count = block_.runs = 0;
    return runs;
  }

  // Sets the sums of the runs to the gradients
  //   of the query and of the score weights               by segment
  //   of the key and, unless additive, of the value       by row
  //   of the value                                        by row, if the logits are given: there are no keys
  void AddGradients() {
    const bool by_row = kPass == Pass::kByRow;
    if (HasSecondSums()) WriteZeros(of_runs_.second_sums, block_.runs * features_);
    const auto add = [&](const C* const* rows, C scale, const C* factors, C* sums) {
      AddRows(rows, block_, scale, factors, sums);
    };
    if (call_.score == ScoreKind::kAdditive) {
      AddScoreDerivatives<kPass == Pass::kBySegment>(AdditiveScore<C>::Of(call_), block_, score_weights_, logits_,
                                                     of_runs_.first_sums, of_runs_.second_sums);
    } else if (call_.score == ScoreKind::kDotProduct) {
      add(block_.rows[by_row ? kQuery : kKey], DotScore<C>::Of(call_).scale, logits_, of_runs_.first_sums);
    }
    C* const of_value = HasSecondSums() ? of_runs_.second_sums : of_runs_.first_sums;
    if (by_row) add(block_.rows[kDOutput], C{1}, probabilities_, of_value);
  }

  bool HasSecondSums() const { return second_ != nullptr || d_score_weights_ != nullptr; }

  // Computes the block, and finishes its segments but the last one, which may have more edges.
  void Fold() {
    const int64_t runs = Compute();
    for (int64_t run = 0; run < runs; ++run) {
      const int64_t segment = block_.segments[block_.run_begins[run]];
      const SegmentStates<C> state = of_runs_.At(run, num_heads_, features_);
      if (segment == carried_segment_) {
        MergeIntoCarry(state);
        continue;
      }
      FinishCarried();
      if (run + 1 < runs) {
        Finish(segment, state);
      } else {
        carried_segment_ = segment;
        std::copy_n(state.first_sums, features_, carry_.first_sums);
        if (HasSecondSums()) std::copy_n(state.second_sums, features_, carry_.second_sums);
        std::copy_n(state.maxima, num_heads_, carry_.maxima);
        std::copy_n(state.totals, num_heads_, carry_.totals);
      }
    }
  }

  void MergeIntoCarry(const SegmentStates<C>& later) {
    if (kPass == Pass::kForward) return MergeStates(num_heads_, block_.head_features, later, carry_);
    AddSums(features_, later.first_sums, carry_.first_sums);
    if (HasSecondSums()) AddSums(features_, later.second_sums, carry_.second_sums);
  }

  void FinishCarried() {
    if (carried_segment_ >= 0) Finish(carried_segment_, carry_);
    carried_segment_ = -1;
  }

  // Writes the results of a segment.
  void Finish(int64_t segment, const SegmentStates<C>& state) const {
    if (kPass == Pass::kForward) {
      DivideByTotals(num_heads_, block_.head_features, state.totals, state.first_sums);
      std::copy_n(state.maxima, num_heads_, maxima_ + segment * num_heads_);
      std::copy_n(state.totals, num_heads_, totals_ + segment * num_heads_);
    }
    row_type_.narrow(state.first_sums, features_, first_ + segment * row_bytes_);
    if (second_ != nullptr) row_type_.narrow(state.second_sums, features_, second_ + segment * row_bytes_);
    if (d_score_weights_ != nullptr) std::copy_n(state.second_sums, features_, d_score_weights_ + segment * features_);
  }

  const AttentionCall& call_;
  const RowType<C> row_type_;
  const int64_t num_heads_, features_, row_bytes_, segments_, num_rows_, block_edges_;
  const bool rows_exceed_cache_;
  const int64_t first_id_;
  const SegmentIds ids_;
  const int32_t* const gather_ids_;
  const EdgeNumbers numbers_;
  const int32_t* const rows_of_edges_;
  const C* const bias_;
  const char* operands_[kOperands];  // nullptr if the call lacks it, or has no edges
  const C* score_weights_ = nullptr;
  Softmax<C> softmax_;
  char *first_, *second_;  // results, see Results
  C *d_score_weights_, *maxima_, *totals_, *d_bias_;
  EdgeBlock<C> block_;
  int64_t carried_segment_ = -1;  // whose state is carry_
  Memory<C> memory_;
  C *logits_, *probabilities_, *widened_weights_;
  C* widened_[kOperands];
  SegmentStates<C> of_runs_, carry_, empty_;
};

// Returns false if memory allocation fails.
template <Pass kPass>
bool RunPass(ffi::ThreadPool& pool, const AttentionCall& call, const Results& results) {
  const Problem& problem = call.problem;
  const int64_t edges = call.num_rows == 0 || problem.features == 0 ? 0 : problem.rows;
  if (problem.batch == 0 || problem.segments == 0) return true;
  const int64_t edge_bytes = 2 * problem.features * ElementBytes(call.type);
  const int64_t chunks = std::max<int64_t>(1, std::min(edges, ChunksFor(pool, edges * edge_bytes)));
  const int64_t id_lists = problem.ids_are_shared ? 1 : problem.batch;
  const auto borders = Allocate<ChunkBorder>(id_lists * (chunks + 1));
  if (borders == nullptr) return false;
  for (int64_t b = 0; b < id_lists; ++b) {
    FindBorders(call, problem.IdIndex(b, 0), edges, chunks, borders.get() + b * (chunks + 1));
  }
  std::atomic<bool> has_memory{true};
  DispatchFloating(call.type, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto row_type = RowTypeOf<T>();
    ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
      const int64_t b = index / chunks, list = problem.ids_are_shared ? 0 : b;
      const ChunkBorder* const border = borders.get() + list * (chunks + 1) + index % chunks;
      if (border[0].segment == border[1].segment) return;
      AttentionPass<ComputeType<T>, kPass> pass(call, b, row_type, results);
      if (pass.has_memory()) {
        pass.Run(border[0], border[1]);
      } else {
        has_memory = false;
      }
    });
  });
  return has_memory;
}

// Dropped edges, and edges missing from an invalid order, get 0.
void ZeroBiasGradient(ffi::ThreadPool& pool, const AttentionCall& call, void* d_bias) {
  if (d_bias != nullptr) WriteZeroBytes(pool, d_bias, BiasBytes(call));
}

Plan PlanOf(const AttentionCall& call) { return {call.problem.HasNoResult() ? kNothing : "segments"}; }

}  // namespace

std::vector<const char*> AttentionCall::Strategies() { return {kNothing, "segments"}; }

Plan AttentionForwardCall::MakePlan() const { return PlanOf(*this); }

bool AttentionForwardCall::Run(ffi::ThreadPool& pool) const {
  Results results;
  results.first = output;
  results.maxima = new_maxima;
  results.totals = new_totals;
  return RunPass<Pass::kForward>(pool, *this, results);
}

Plan AttentionBySegmentCall::MakePlan() const { return PlanOf(*this); }

bool AttentionBySegmentCall::Run(ffi::ThreadPool& pool) const {
  ZeroBiasGradient(pool, *this, d_bias);
  Results results;
  results.first = d_query;
  results.d_score_weights = d_score_weights;
  results.d_bias = d_bias;
  return RunPass<Pass::kBySegment>(pool, *this, results);
}

Plan AttentionByRowCall::MakePlan() const { return PlanOf(*this); }

bool AttentionByRowCall::Run(ffi::ThreadPool& pool) const {
  ZeroBiasGradient(pool, *this, d_bias);
  Results results;
  results.first = score == ScoreKind::kGiven ? d_value : d_key;
  results.second = score == ScoreKind::kGiven ? nullptr : d_value;
  results.d_bias = d_bias;
  return RunPass<Pass::kByRow>(pool, *this, results);
}

}  // namespace jax_baracuda::segment
