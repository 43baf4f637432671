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

template <typename Score>
constexpr bool HasOperand(Pass pass, int operand) {
  if (operand == kValue) return !Score::kIsAdditive;  // there, keys are values
  return operand == kDOutput ? pass != Pass::kForward : !Score::kIsGiven;
}

constexpr bool HasSecondSums(Pass pass, bool is_given, bool is_additive) {
  return pass != Pass::kForward && !is_given && (pass == Pass::kByRow) != is_additive;
}

// ---------------------------------------------------------------------------------------------------------------------
// The arithmetic of a block of edges.

template <typename Score>
struct ScoredHeads {
  using C = typename Score::Number;

  Score score;
  int64_t heads, head_features;
  const C* score_weights;  // [heads, features of a head], if additive

  int64_t features() const { return heads * head_features; }
};

// What segments, or some of their edges, add up: the sums of rows, and the softmax of each head.
template <typename C>
struct SegmentStates {
  C *first_sums, *second_sums;  // [states, heads, features of a head]
  C *maxima, *totals;           // [states, heads]

  JB_INLINE SegmentStates At(int64_t index, int64_t heads, int64_t features) const {
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
  int64_t count = 0, runs = 0;
  int64_t run_begins[kMaxBlockEdges + 1];
  const C* rows[kOperands][kMaxBlockEdges];
  int64_t first_heads[kMaxBlockEdges];  // where the softmax of the query begins
  int64_t segments[kMaxBlockEdges], edges[kMaxBlockEdges];
};

// Calls body with the number of a head's features: a constant, once body is inlined, if it is small. Doubles are too
// rare to compile them for each constant.
template <typename C, typename Body>
JB_INLINE void WithHeadFeatures(int64_t head_features, const Body& body) {
  if constexpr (std::is_same_v<C, float>) {
    if (DispatchConstant<1, 4, 8, 16, 32>(head_features, body)) return;
  }
  body(head_features);
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

// Adds the scores of the edges to `logits` [edges, heads].
template <typename C, typename Score>
JB_INLINE void AddScores(int64_t width, const ScoredHeads<Score>& heads, const EdgeBlock<C>& block, C* logits) {
  if constexpr (!Score::kIsGiven) {
    for (int64_t e = 0; e < block.count; ++e) {
      const C *query = block.rows[kQuery][e], *key = block.rows[kKey][e];
      for (int64_t head = 0; head < heads.heads; ++head) {
        const int64_t first = head * width;
        const C sum = SumOfHead<C>(width, [&](int64_t i) __attribute__((always_inline)) {
          const C weight = Score::kIsAdditive ? heads.score_weights[first + i] : C{0};
          return heads.score.Term(query[first + i], key[first + i], weight);
        });
        logits[e * heads.heads + head] += heads.score.Logit(sum);
      }
    }
  }
}

// Calls body(e * heads + head, e, head) for the heads of the edges [begin, end).
template <typename Body>
JB_INLINE void ForEachHead(int64_t begin, int64_t end, int64_t heads, const Body& body) {
  for (int64_t e = begin; e < end; ++e) {
    for (int64_t head = 0; head < heads; ++head) body(e * heads + head, e, head);
  }
}

template <typename C>
JB_INLINE void ExpEach(int64_t count, C* numbers) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) numbers[i] = Exp(numbers[i]);
}

// Replaces `logits` [edges, heads], which hold the bias, by the weights, and sets the states to those of the runs.
template <typename C, typename Score>
JB_CPU_CLONES void ForwardBlock(const ScoredHeads<Score> heads, const EdgeBlock<C>& block, C* logits,
                                const SegmentStates<C> states) {
  const int64_t num_heads = heads.heads;
  WithHeadFeatures<C>(heads.head_features, [&](int64_t width) __attribute__((always_inline)) {
    const int64_t features = num_heads * width;
    AddScores(width, heads, block, logits);
    for (int64_t run = 0; run < block.runs; ++run) {
      const int64_t begin = block.run_begins[run], end = block.run_begins[run + 1];
      C* const maxima = states.maxima + run * num_heads;
      std::fill_n(maxima, num_heads, kLowestLogit<C>);
      // This comparison drops a NaN, but the total keeps it.
      ForEachHead(begin, end, num_heads, [&](int64_t at, int64_t, int64_t head) __attribute__((always_inline)) {
        maxima[head] = logits[at] > maxima[head] ? logits[at] : maxima[head];
      });
      ForEachHead(begin, end, num_heads, [&](int64_t at, int64_t, int64_t head) __attribute__((always_inline)) {
        logits[at] -= maxima[head];
      });
    }
    ExpEach(block.count * num_heads, logits);
    for (int64_t run = 0; run < block.runs; ++run) {
      const SegmentStates<C> state = states.At(run, num_heads, features);
      std::fill_n(state.totals, num_heads, C{0});
      WriteZeros(state.first_sums, features);
      ForEachHead(block.run_begins[run], block.run_begins[run + 1], num_heads,
                  [&](int64_t at, int64_t e, int64_t head) __attribute__((always_inline)) {
                    const C weight = logits[at];
                    const C* const value = block.rows[kValue][e] + head * width;
                    C* const sums = state.first_sums + head * width;
                    state.totals[head] += weight;
                    JB_VECTORIZE
                    for (int64_t i = 0; i < width; ++i) sums[i] += weight * value[i];
                  });
    }
  });
}

// Merges the state of later edges into `state`.
template <typename C>
JB_CPU_CLONES void MergeStates(int64_t heads, int64_t head_features, const SegmentStates<C> later,
                               const SegmentStates<C> state) {
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

// Replaces `logits` [edges, heads], which hold the bias, by their gradient, and writes the probabilities.
template <typename C, typename Score>
JB_INLINE void Differentiate(int64_t width, const ScoredHeads<Score>& heads, const EdgeBlock<C>& block,
                             const Softmax<C>& softmax, C* logits, C* probabilities) {
  const int64_t num_heads = heads.heads, edges = block.count;
  AddScores(width, heads, block, logits);
  ForEachHead(0, edges, num_heads, [&](int64_t at, int64_t e, int64_t head) __attribute__((always_inline)) {
    const C distance = logits[at] - softmax.maxima[block.first_heads[e] + head];
    probabilities[at] = distance > C{0} ? C{0} : distance;  // the maximum may have been rounded otherwise
  });
  ExpEach(edges * num_heads, probabilities);
  ForEachHead(0, edges, num_heads, [&](int64_t at, int64_t e, int64_t head) __attribute__((always_inline)) {
    const int64_t cell = block.first_heads[e] + head;
    const C *d_output = block.rows[kDOutput][e] + head * width, *value = block.rows[kValue][e] + head * width;
    const C d_probability =
        SumOfHead<C>(width, [&](int64_t i) __attribute__((always_inline)) { return d_output[i] * value[i]; });
    probabilities[at] *= InverseTotal(softmax.totals[cell]);
    logits[at] = probabilities[at] * (d_probability - softmax.means[cell]);
  });
}

// As Differentiate; sets the sums of the runs to the gradients
//   of the query and of the score weights               by segment
//   of the key and, unless additive, of the value       by row
//   of the value                                        by row, if the logits are given: there are no keys
template <Pass kPass, typename C, typename Score>
JB_CPU_CLONES void GradientBlock(const ScoredHeads<Score> heads, const EdgeBlock<C>& block, const Softmax<C> softmax,
                                 C* logits, C* probabilities, const SegmentStates<C> states) {
  constexpr bool kIsAdditive = Score::kIsAdditive, kByRow = kPass == Pass::kByRow;
  WithHeadFeatures<C>(heads.head_features, [&](int64_t width) __attribute__((always_inline)) {
    const int64_t features = heads.heads * width;
    Differentiate(width, heads, block, softmax, logits, probabilities);
    for (int64_t run = 0; run < block.runs; ++run) {
      const SegmentStates<C> state = states.At(run, heads.heads, features);
      WriteZeros(state.first_sums, features);
      if constexpr (HasSecondSums(kPass, Score::kIsGiven, kIsAdditive)) WriteZeros(state.second_sums, features);
      const auto add = [&](int64_t at, int64_t e, int64_t head) __attribute__((always_inline)) {
        const int64_t first = head * width;
        const C probability = probabilities[at];
        C d_sum{0};
        if constexpr (!Score::kIsGiven) d_sum = heads.score.OfSum(logits[at]);
        const C* const query = Score::kIsGiven ? nullptr : block.rows[kQuery][e] + first;
        const C* const key = Score::kIsGiven ? nullptr : block.rows[kKey][e] + first;
        const C *d_output = block.rows[kDOutput][e] + first, *weights = heads.score_weights + (kIsAdditive ? first : 0);
        C *first_sums = state.first_sums + first, *second_sums = state.second_sums + first;
        JB_VECTORIZE
        for (int64_t i = 0; i < width; ++i) {
          const C weight = kIsAdditive ? weights[i] : C{0};
          if constexpr (Score::kIsGiven) {
            first_sums[i] += probability * d_output[i];
          } else if constexpr (kByRow) {
            const C by_key = d_sum * heads.score.ByKey(query[i], key[i], weight);
            const C of_value = probability * d_output[i];
            first_sums[i] += kIsAdditive ? by_key + of_value : by_key;
            if constexpr (!kIsAdditive) second_sums[i] += of_value;
          } else {
            first_sums[i] += d_sum * heads.score.ByQuery(query[i], key[i], weight);
            if constexpr (kIsAdditive) second_sums[i] += d_sum * heads.score.Leaky(query[i] + key[i]);
          }
        }
      };
      ForEachHead(block.run_begins[run], block.run_begins[run + 1], heads.heads, add);
    }
  });
}

template <typename C>
JB_CPU_CLONES void AddSums(int64_t features, const C* later, C* sums) {
  JB_VECTORIZE
  for (int64_t i = 0; i < features; ++i) sums[i] += later[i];
}

// ---------------------------------------------------------------------------------------------------------------------
// The passes, for a chunk of segments.

template <typename T>
constexpr bool kHoldsRows = !std::is_same_v<T, ComputeType<T>>;

// A row in ComputeType<T>: in place, or widened into `memory`.
template <typename T>
JB_INLINE const ComputeType<T>* NumbersOf(const T* row, int64_t count, ComputeType<T>* memory) {
  if constexpr (kHoldsRows<T>) {
    Widen(row, count, memory);
    return memory;
  } else {
    return row;
  }
}

template <typename T>
JB_INLINE void WriteRow(const ComputeType<T>* numbers, int64_t count, T* to) {
  if constexpr (kHoldsRows<T>) {
    Narrow(numbers, count, to);
  } else {
    std::copy_n(numbers, count, to);
  }
}

// The results of a batch element; those that a pass does not have are nullptr.
template <typename T>
struct Results {
  using C = ComputeType<T>;

  T *first, *second;   // rows: the first and the second sums of segments
  C* d_score_weights;  // the second sums
  C *maxima, *totals;
  C* d_bias;
};

template <typename To>
To* OfBatch(void* array, int64_t batch, int64_t size) {
  return array == nullptr ? nullptr : static_cast<To*>(array) + batch * size;
}

template <typename T, typename C = ComputeType<T>>
Results<T> ResultsOf(const AttentionForwardCall& call, int64_t b, int64_t cells) {
  const int64_t heads = call.problem.segments * call.heads;
  return {OfBatch<T>(call.output, b, cells),     nullptr, nullptr, OfBatch<C>(call.new_maxima, b, heads),
          OfBatch<C>(call.new_totals, b, heads), nullptr};
}

template <typename T, typename C = ComputeType<T>>
Results<T> ResultsOf(const AttentionBySegmentCall& call, int64_t b, int64_t cells) {
  return {OfBatch<T>(call.d_query, b, cells),
          nullptr,
          OfBatch<C>(call.d_score_weights, b, cells),
          nullptr,
          nullptr,
          OfBatch<C>(call.d_bias, b, call.problem.rows * call.heads)};
}

template <typename T, typename C = ComputeType<T>>
Results<T> ResultsOf(const AttentionByRowCall& call, int64_t b, int64_t cells) {
  T *const d_key = OfBatch<T>(call.d_key, b, cells), *const d_value = OfBatch<T>(call.d_value, b, cells);
  const bool is_given = call.score == ScoreKind::kGiven;
  return {is_given ? d_value : d_key,
          is_given ? nullptr : d_value,
          nullptr,
          nullptr,
          nullptr,
          OfBatch<C>(call.d_bias, b, call.problem.rows * call.heads)};
}

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

template <typename T, typename Score, Pass kPass>
class AttentionPass {
 public:
  using C = ComputeType<T>;

  AttentionPass(const AttentionCall& call, int64_t b, const Results<T>& results)
      : heads_{Score::Of(call), call.heads, call.head_features, nullptr},
        num_heads_(call.heads),
        features_(call.problem.features),
        segments_(call.problem.segments),
        num_rows_(call.num_rows),
        block_edges_(std::clamp<int64_t>(kBlockNumbers / std::max<int64_t>(1, features_), 1, kMaxBlockEdges)),
        rows_exceed_cache_(ExceedsNearCache((segments_ + num_rows_) * features_, sizeof(T))),
        first_id_(call.problem.IdIndex(b, 0)),
        ids_(call),
        gather_ids_(call.gather_ids.Of<int32_t>(b, call.problem.rows)),
        numbers_(call.edge_order.Of<int32_t>(b, call.problem.rows), call.problem.rows),
        rows_of_edges_(call.rows_of_edges.Of<int32_t>(b, call.problem.rows)),
        bias_(call.bias.Of<C>(b, call.problem.rows * num_heads_)),
        results_(results) {
    const BatchOperand* const operands[kOperands] = {&call.query, &call.key, &call.value, &call.d_output};
    ForEachOperand([&](auto operand) {
      const int64_t extent = BelongsToSegments(kPass, operand) ? segments_ : num_rows_;
      operands_[operand] = operands[operand]->template Of<T>(b, extent * features_);
    });
    const int64_t queries = BelongsToSegments(kPass, kQuery) ? segments_ : num_rows_, size = queries * num_heads_;
    softmax_ = {call.maxima.Of<C>(b, size), call.totals.Of<C>(b, size), call.means.Of<C>(b, size)};
    memory_ = Allocate<C>(PlaceAll(nullptr));
    if (memory_ == nullptr) return;
    PlaceAll(memory_.get());
    WriteZeros(empty_.first_sums, features_);
    WriteZeros(empty_.second_sums, features_);
    std::fill_n(empty_.maxima, num_heads_, kLowestLogit<C>);
    std::fill_n(empty_.totals, num_heads_, C{0});
    if constexpr (Score::kIsAdditive) {
      heads_.score_weights = NumbersOf(call.score_weights.Of<T>(b, features_), features_, score_weights_);
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
    if constexpr (kPass == Pass::kByRow && Score::kIsGiven) RunRowless(begin, end);
  }

 private:
  static constexpr int64_t kLine = kCacheLine / sizeof(C);
  static constexpr bool kHasSecondSums = HasSecondSums(kPass, Score::kIsGiven, Score::kIsAdditive);

  // Calls body with each operand that the pass has, as a constant.
  template <typename Body>
  JB_INLINE static void ForEachOperand(const Body& body) {
    if constexpr (HasOperand<Score>(kPass, kQuery)) body(std::integral_constant<int, kQuery>{});
    if constexpr (HasOperand<Score>(kPass, kKey)) body(std::integral_constant<int, kKey>{});
    if constexpr (HasOperand<Score>(kPass, kValue)) body(std::integral_constant<int, kValue>{});
    if constexpr (HasOperand<Score>(kPass, kDOutput)) body(std::integral_constant<int, kDOutput>{});
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
    score_weights_ = take(features_);
    for (C*& rows : widened_) rows = take(kHoldsRows<T> ? block_edges_ * features_ : 0);
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

  JB_INLINE void Prefetch(int64_t row, int64_t edge) const {
    if (rows_exceed_cache_) {
      ForEachOperand([&](auto operand) __attribute__((always_inline)) {
        if constexpr (!BelongsToSegments(kPass, operand)) {
          PrefetchRow(operands_[operand] + row * features_, features_);
        }
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
                                          : NumbersOf(operands_[operand] + (kOfSegment ? segment : row) * features_,
                                                      features_, widened_[operand] + e * features_);
    });
    if (Score::kIsAdditive) block_.rows[kValue][e] = block_.rows[kKey][e];
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
    if constexpr (kPass == Pass::kForward) {
      ForwardBlock(heads_, block_, logits_, of_runs_);
    } else {
      GradientBlock<kPass>(heads_, block_, softmax_, logits_, probabilities_, of_runs_);
    }
    for (int64_t e = 0; results_.d_bias != nullptr && e < block_.count; ++e) {
      std::copy_n(logits_ + e * num_heads_, num_heads_, results_.d_bias + block_.edges[e] * num_heads_);
    }
    block_.count = block_.runs = 0;
    return runs;
  }

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
        if (kHasSecondSums) std::copy_n(state.second_sums, features_, carry_.second_sums);
        std::copy_n(state.maxima, num_heads_, carry_.maxima);
        std::copy_n(state.totals, num_heads_, carry_.totals);
      }
    }
  }

  void MergeIntoCarry(const SegmentStates<C>& later) {
    if constexpr (kPass == Pass::kForward) return MergeStates(num_heads_, heads_.head_features, later, carry_);
    AddSums(features_, later.first_sums, carry_.first_sums);
    if (kHasSecondSums) AddSums(features_, later.second_sums, carry_.second_sums);
  }

  void FinishCarried() {
    if (carried_segment_ >= 0) Finish(carried_segment_, carry_);
    carried_segment_ = -1;
  }

  // Writes the results of a segment.
  void Finish(int64_t segment, const SegmentStates<C>& state) const {
    const int64_t cell = segment * features_;
    if constexpr (kPass == Pass::kForward) {
      DivideByTotals(num_heads_, heads_.head_features, state.totals, state.first_sums);
      std::copy_n(state.maxima, num_heads_, results_.maxima + segment * num_heads_);
      std::copy_n(state.totals, num_heads_, results_.totals + segment * num_heads_);
    }
    WriteRow(state.first_sums, features_, results_.first + cell);
    if (results_.second != nullptr) WriteRow(state.second_sums, features_, results_.second + cell);
    if (results_.d_score_weights != nullptr) std::copy_n(state.second_sums, features_, results_.d_score_weights + cell);
  }

  ScoredHeads<Score> heads_;
  const int64_t num_heads_, features_, segments_, num_rows_, block_edges_;
  const bool rows_exceed_cache_;
  const int64_t first_id_;
  const SegmentIds ids_;
  const int32_t* const gather_ids_;
  const EdgeNumbers numbers_;
  const int32_t* const rows_of_edges_;
  const T* operands_[kOperands];
  const C* const bias_;
  Softmax<C> softmax_;
  const Results<T> results_;
  EdgeBlock<C> block_;
  int64_t carried_segment_ = -1;  // whose state is carry_
  Memory<C> memory_;
  C *logits_, *probabilities_, *score_weights_;
  C* widened_[kOperands];
  SegmentStates<C> of_runs_, carry_, empty_;
};

// Returns false if memory allocation fails.
template <Pass kPass, typename Call>
bool RunPass(ffi::ThreadPool& pool, const Call& call) {
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
    DispatchScore<ComputeType<T>, kPass != Pass::kBySegment>(call, [&](auto score) {
      ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
        const int64_t b = index / chunks, list = problem.ids_are_shared ? 0 : b;
        const ChunkBorder* const border = borders.get() + list * (chunks + 1) + index % chunks;
        if (border[0].segment == border[1].segment) return;
        AttentionPass<T, decltype(score), kPass> pass(call, b,
                                                      ResultsOf<T>(call, b, problem.segments * problem.features));
        if (pass.has_memory()) {
          pass.Run(border[0], border[1]);
        } else {
          has_memory = false;
        }
      });
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
  AdviseHugePages(output, problem.NumCells() * ElementBytes(type));
  return RunPass<Pass::kForward>(pool, *this);
}

Plan AttentionBySegmentCall::MakePlan() const { return PlanOf(*this); }

bool AttentionBySegmentCall::Run(ffi::ThreadPool& pool) const {
  ZeroBiasGradient(pool, *this, d_bias);
  AdviseHugePages(d_query, problem.NumCells() * ElementBytes(type));
  return RunPass<Pass::kBySegment>(pool, *this);
}

Plan AttentionByRowCall::MakePlan() const { return PlanOf(*this); }

bool AttentionByRowCall::Run(ffi::ThreadPool& pool) const {
  for (void* const result : {d_key, d_value}) {
    if (result != nullptr) AdviseHugePages(result, problem.NumCells() * ElementBytes(type));
  }
  ZeroBiasGradient(pool, *this, d_bias);
  return RunPass<Pass::kByRow>(pool, *this);
}

}  // namespace jax_baracuda::segment
