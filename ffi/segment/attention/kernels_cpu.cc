// The CPU kernels of attention over edges and its gradients.
//
// A chunk of work is a range of segments with all of their edges, so results do not depend on the number of chunks. The
// edges of a segment are computed in blocks: first all logits of a block, then all exponentials, which vectorise over
// edges and heads, then the sums. Each block has sums of its own, which are merged into those of the segment. This
// keeps rounding errors small in segments of many edges.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "ffi/core/alignment.h"
#include "ffi/core/exp_cpu.h"
#include "ffi/segment/attention/arithmetic.h"
#include "ffi/segment/attention/handler.h"
#include "ffi/segment/engine/gathered_rows_cpu.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kMaxBlockEdges = 32;
constexpr int64_t kBlockNumbers = 4096;        // of the rows of a block, so that they stay in the L1 cache
constexpr int64_t kEdgePrefetchDistance = 16;  // in edges

int64_t BlockEdges(int64_t features) {
  return std::clamp<int64_t>(kBlockNumbers / std::max<int64_t>(1, features), 1, kMaxBlockEdges);
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

// The edges of a block: rows [heads, features of a head], and the softmax of the query's segment [heads]. Each pass
// sets those that it needs.
template <typename C>
struct EdgeBlock {
  int64_t count = 0;
  const C* queries[kMaxBlockEdges];
  const C* keys[kMaxBlockEdges];
  const C* values[kMaxBlockEdges];
  const C* d_outputs[kMaxBlockEdges];
  const C* maxima[kMaxBlockEdges];
  const C* totals[kMaxBlockEdges];
  const C* means[kMaxBlockEdges];
  int64_t edges[kMaxBlockEdges];  // their numbers
};

// What a segment, or one block of its edges, adds up: the sums of rows, and the softmax of each head.
template <typename C>
struct SegmentState {
  C *first_sums, *second_sums;  // [heads, features of a head]
  C *maxima, *totals;           // [heads]
};

// Calls body with the number of a head's features: a constant, once body is inlined, if it is small.
template <typename Body>
JB_INLINE void WithHeadFeatures(int64_t head_features, const Body& body) {
  if (!DispatchConstant<1, 4, 8, 16, 32>(head_features, body)) body(head_features);
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

template <typename C, typename Term>
JB_INLINE C SumOfHead(int64_t count, const Term& term) {
  C sum{0};
  int64_t done = 0;
  if (count >= 16) {
    done = count / 16 * 16;
    sum = SumInLanes<16, C>(done, term);
  } else if (count >= 8) {
    done = 8;
    sum = SumInLanes<8, C>(done, term);
  } else if (count >= 4) {
    done = 4;
    sum = SumInLanes<4, C>(done, term);
  }
  for (; done < count; ++done) sum += term(done);
  return sum;
}

// Adds the scores of the edges to `logits` [edges, heads].
template <typename C, typename Score>
JB_INLINE void AddScores(int64_t width, const ScoredHeads<Score>& heads, const EdgeBlock<C>& block, C* logits) {
  if constexpr (!Score::kIsGiven) {
    for (int64_t e = 0; e < block.count; ++e) {
      const C *query = block.queries[e], *key = block.keys[e];
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

// numbers[e, head] = change(numbers[e, head], e, head).
template <typename C, typename Change>
JB_INLINE void ForEachHead(int64_t edges, int64_t heads, C* numbers, const Change& change) {
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t head = 0; head < heads; ++head, ++numbers) *numbers = change(*numbers, e, head);
  }
}

// Calls add(e, e * heads + head, first feature of the head) for the heads of all edges.
template <typename C, typename Score, typename Add>
JB_INLINE void AddEdges(int64_t width, const ScoredHeads<Score>& heads, const EdgeBlock<C>& block, const Add& add) {
  for (int64_t e = 0; e < block.count; ++e) {
    for (int64_t head = 0; head < heads.heads; ++head) add(e, e * heads.heads + head, head * width);
  }
}

template <typename C>
JB_INLINE void ExpEach(int64_t count, C* numbers) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) numbers[i] = Exp(numbers[i]);
}

// Replaces `logits` [edges, heads], which hold the bias, by the weights, and sets the state to that of the block.
template <typename C, typename Score>
JB_CPU_CLONES void ForwardBlock(const ScoredHeads<Score> heads, const EdgeBlock<C>& block, C* logits,
                                const SegmentState<C> state) {
  const int64_t num_heads = heads.heads;
  WithHeadFeatures(heads.head_features, [&](int64_t width) __attribute__((always_inline)) {
    AddScores(width, heads, block, logits);
    std::fill_n(state.maxima, num_heads, kLowestLogit<C>);
    std::fill_n(state.totals, num_heads, C{0});
    WriteZeros(state.first_sums, num_heads * width);
    // This comparison drops a NaN, but the total keeps it.
    ForEachHead(block.count, num_heads, logits, [&](C logit, int64_t, int64_t head) __attribute__((always_inline)) {
      state.maxima[head] = logit > state.maxima[head] ? logit : state.maxima[head];
      return logit;
    });
    ForEachHead(block.count, num_heads, logits, [&](C logit, int64_t, int64_t head) __attribute__((always_inline)) {
      return logit - state.maxima[head];
    });
    ExpEach(block.count * num_heads, logits);
    ForEachHead(block.count, num_heads, logits, [&](C weight, int64_t, int64_t head) __attribute__((always_inline)) {
      state.totals[head] += weight;
      return weight;
    });
    AddEdges(width, heads, block, [&](int64_t e, int64_t at, int64_t first) __attribute__((always_inline)) {
      const C weight = logits[at];
      const C* const value = block.values[e] + first;
      C* const sums = state.first_sums + first;
      JB_VECTORIZE
      for (int64_t i = 0; i < width; ++i) sums[i] += weight * value[i];
    });
  });
}

// Merges the state of later edges into `state`.
template <typename C>
JB_CPU_CLONES void MergeStates(int64_t heads, int64_t head_features, const SegmentState<C> later,
                               const SegmentState<C> state) {
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
JB_INLINE void Differentiate(int64_t width, const ScoredHeads<Score>& heads, const EdgeBlock<C>& block, C* logits,
                             C* probabilities) {
  const int64_t num_heads = heads.heads;
  AddScores(width, heads, block, logits);
  ForEachHead(block.count, num_heads, probabilities, [&](C, int64_t e, int64_t head) __attribute__((always_inline)) {
    const C distance = logits[e * num_heads + head] - block.maxima[e][head];
    return distance > C{0} ? C{0} : distance;  // the maximum may have been rounded otherwise
  });
  ExpEach(block.count * num_heads, probabilities);
  ForEachHead(block.count, num_heads, probabilities,
              [&](C weight, int64_t e, int64_t head)
                  __attribute__((always_inline)) { return weight * InverseTotal(block.totals[e][head]); });
  ForEachHead(block.count, num_heads, logits, [&](C, int64_t e, int64_t head) __attribute__((always_inline)) {
    const C *d_output = block.d_outputs[e] + head * width, *value = block.values[e] + head * width;
    const C d_probability =
        SumOfHead<C>(width, [&](int64_t i) __attribute__((always_inline)) { return d_output[i] * value[i]; });
    return probabilities[e * num_heads + head] * (d_probability - block.means[e][head]);
  });
}

// As Differentiate; sets the sums to the gradients of the query and of the score weights.
template <typename C, typename Score>
JB_CPU_CLONES void BySegmentBlock(const ScoredHeads<Score> heads, const EdgeBlock<C>& block, C* logits,
                                  C* probabilities, const SegmentState<C> state) {
  WithHeadFeatures(heads.head_features, [&](int64_t width) __attribute__((always_inline)) {
    Differentiate(width, heads, block, logits, probabilities);
    WriteZeros(state.first_sums, heads.heads * width);
    WriteZeros(state.second_sums, heads.heads * width);
    AddEdges(width, heads, block, [&](int64_t e, int64_t at, int64_t first) __attribute__((always_inline)) {
      const C d_logit = logits[at];
      const C *query = block.queries[e] + first, *key = block.keys[e] + first;
      const C* const weights = heads.score_weights + (Score::kIsAdditive ? first : 0);
      C *d_query = state.first_sums + first, *d_weights = state.second_sums + first;
      JB_VECTORIZE
      for (int64_t i = 0; i < width; ++i) {
        const C weight = Score::kIsAdditive ? weights[i] : C{0};
        d_query[i] += d_logit * heads.score.ByQuery(query[i], key[i], weight);
        if constexpr (Score::kIsAdditive) d_weights[i] += d_logit * heads.score.Leaky(query[i] + key[i]);
      }
    });
  });
}

// As Differentiate; sets the sums to the gradients of the key and, unless additive, of the value. If the logits are
// given, there are no keys, and the first sums are those of the value.
template <typename C, typename Score>
JB_CPU_CLONES void ByRowBlock(const ScoredHeads<Score> heads, const EdgeBlock<C>& block, C* logits, C* probabilities,
                              const SegmentState<C> state) {
  WithHeadFeatures(heads.head_features, [&](int64_t width) __attribute__((always_inline)) {
    Differentiate(width, heads, block, logits, probabilities);
    WriteZeros(state.first_sums, heads.heads * width);
    if constexpr (Score::kIsGiven) {
      AddEdges(width, heads, block, [&](int64_t e, int64_t at, int64_t first) __attribute__((always_inline)) {
        const C probability = probabilities[at];
        const C* const d_output = block.d_outputs[e] + first;
        C* const d_value = state.first_sums + first;
        JB_VECTORIZE
        for (int64_t i = 0; i < width; ++i) d_value[i] += probability * d_output[i];
      });
    } else {
      WriteZeros(state.second_sums, heads.heads * width);
      AddEdges(width, heads, block, [&](int64_t e, int64_t at, int64_t first) __attribute__((always_inline)) {
        const C d_logit = logits[at], probability = probabilities[at];
        const C *query = block.queries[e] + first, *key = block.keys[e] + first, *d_output = block.d_outputs[e] + first;
        const C* const weights = heads.score_weights + (Score::kIsAdditive ? first : 0);
        C *d_key = state.first_sums + first, *d_value = state.second_sums + first;
        JB_VECTORIZE
        for (int64_t i = 0; i < width; ++i) {
          const C weight = Score::kIsAdditive ? weights[i] : C{0};
          const C by_key = d_logit * heads.score.ByKey(query[i], key[i], weight), of_value = probability * d_output[i];
          if constexpr (Score::kIsAdditive) {
            d_key[i] += by_key + of_value;
          } else {
            d_key[i] += by_key;
            d_value[i] += of_value;
          }
        }
      });
    }
  });
}

template <bool kHasSecondSums, typename C>
JB_CPU_CLONES void AddSums(int64_t features, const SegmentState<C> later, const SegmentState<C> state) {
  JB_VECTORIZE
  for (int64_t i = 0; i < features; ++i) {
    state.first_sums[i] += later.first_sums[i];
    if constexpr (kHasSecondSums) state.second_sums[i] += later.second_sums[i];
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The three passes, for a chunk of segments.

// The memory of a chunk.
template <typename C>
class Buffers {
 public:
  Buffers(int64_t heads, int64_t features, bool holds_rows) {
    const int64_t edges = BlockEdges(features), rows = holds_rows ? edges : 0;
    const auto place_all = [&](C* memory) {
      C* next = memory;
      const auto take = [&](int64_t count, C** part) {
        *part = next;
        next += (count + kLine - 1) / kLine * kLine;
      };
      take(edges * heads, &logits);
      take(edges * heads, &probabilities);
      for (C*& row : of_segment) take(features, &row);
      for (C*& row : of_edges) take(rows * features, &row);
      take(features, &score_weights);
      for (SegmentState<C>* state : {&segment, &block}) {
        take(features, &state->first_sums);
        take(features, &state->second_sums);
        take(heads, &state->maxima);
        take(heads, &state->totals);
      }
      return next - memory;
    };
    memory_ = Allocate<C>(place_all(nullptr) + kLine);
    if (memory_ != nullptr) place_all(AlignUp(memory_.get(), kCacheLine));
  }

  bool has_memory() const { return memory_ != nullptr; }

  C *logits, *probabilities;  // [edges of a block, heads]
  C* of_segment[2];           // rows of the segment
  C* of_edges[2];             // rows of the edges of a block, unless the kernels read those in place
  C* score_weights;
  SegmentState<C> segment, block;

 private:
  static constexpr int64_t kLine = kCacheLine / sizeof(C);

  std::unique_ptr<C[]> memory_;
};

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

// What the passes share: the operands of one batch element, and the block that edges are added to. A pass has
//   Start(segment)             before the first edge of a segment
//   Add(row, edge)             adds an edge to the block, which is not full
//   Fold(is_first)             computes the block, which has an edge; is_first: the first of the segment
//   Finish(segment)            writes the results of a segment with edges
//   WriteEmpty(segment)        writes those of one without edges
//   PrefetchEdge(row, edge)
// and kClips: whether ids out of range name the nearest row. If kTakesRowlessEdges, it also has
//   StartRowless(edge)         before an edge that belongs to no segment; its results are not written
template <typename T, typename Score>
class AttentionPass {
 public:
  using C = ComputeType<T>;

  AttentionPass(const AttentionCall& call, int64_t segments, int64_t rows, int64_t b, Buffers<C>* buffers)
      : buffers(*buffers),
        heads{Score::Of(call), call.heads, call.head_features, nullptr},
        num_heads(call.heads),
        features(call.problem.features),
        block_edges(BlockEdges(features)),
        query(call.query.Of<T>(b, segments * features)),
        key(call.key.Of<T>(b, rows * features)),
        value(call.value.Of<T>(b, rows * features)),
        d_output(call.d_output.Of<T>(b, segments * features)),
        bias(call.bias.Of<C>(b, call.problem.rows * num_heads)),
        maxima(call.maxima.Of<C>(b, segments * num_heads)),
        totals(call.totals.Of<C>(b, segments * num_heads)),
        means(call.means.Of<C>(b, segments * num_heads)),
        rows_are_far(AreFar((segments + rows) * features, sizeof(T))) {
    if constexpr (Score::kIsAdditive) {
      heads.score_weights = NumbersOf(call.score_weights.Of<T>(b, features), features, buffers->score_weights);
    }
  }

  bool IsFull() const { return block.count == block_edges; }
  bool HasEdges() const { return block.count > 0; }

 protected:
  // Rows of the segment, and of edge `e` of the block. There are two buffers for each.
  JB_INLINE const C* SegmentRow(const T* rows, int64_t segment, int buffer) const {
    return NumbersOf(rows + segment * features, features, buffers.of_segment[buffer]);
  }
  JB_INLINE const C* EdgeRow(const T* rows, int64_t row, int64_t e, int buffer) const {
    return NumbersOf(rows + row * features, features, buffers.of_edges[buffer] + e * features);
  }

  JB_INLINE void TakeBias(int64_t e, int64_t edge) const {
    C* const logits = buffers.logits + e * num_heads;
    if (bias == nullptr) {
      std::fill_n(logits, num_heads, C{0});
    } else {
      std::copy_n(bias + edge * num_heads, num_heads, logits);
    }
  }

  JB_INLINE void PrefetchRows(const T* first, const T* second, int64_t row, int64_t edge) const {
    if (rows_are_far) {
      PrefetchRow(first + row * features, features);
      if (second != nullptr) PrefetchRow(second + row * features, features);
    }
    if (bias != nullptr) __builtin_prefetch(bias + edge * num_heads);
  }

  // Calls compute(state), which sets the state to that of the block, and merges it with that of the segment.
  template <typename Compute, typename Merge>
  JB_INLINE void FoldBlock(bool is_first, const Compute& compute, const Merge& merge) {
    compute(is_first ? buffers.segment : buffers.block);
    if (!is_first) merge(buffers.block, buffers.segment);
    block.count = 0;
  }

  // Writes the gradients of the logits of a block of `count` edges, which FoldBlock has computed.
  JB_INLINE void WriteLogitGradients(int64_t count, C* d_bias) const {
    for (int64_t e = 0; e < count; ++e) {
      std::copy_n(buffers.logits + e * num_heads, num_heads, d_bias + block.edges[e] * num_heads);
    }
  }

  const Buffers<C>& buffers;
  ScoredHeads<Score> heads;
  EdgeBlock<C> block;
  const int64_t num_heads, features, block_edges;
  const T *const query, *const key, *const value, *const d_output;
  const C *const bias, *const maxima, *const totals, *const means;
  const bool rows_are_far;
};

template <typename T, typename Score>
class ForwardPass final : public AttentionPass<T, Score> {
 public:
  using C = ComputeType<T>;
  static constexpr bool kClips = true, kTakesRowlessEdges = false;

  ForwardPass(const AttentionForwardCall& call, int64_t b, Buffers<C>* buffers)
      : AttentionPass<T, Score>(call, call.problem.segments, call.num_rows, b, buffers),
        output_(static_cast<T*>(call.output) + b * call.problem.segments * call.problem.features),
        new_maxima_(static_cast<C*>(call.new_maxima) + b * call.problem.segments * call.heads),
        new_totals_(static_cast<C*>(call.new_totals) + b * call.problem.segments * call.heads) {}

  JB_INLINE void Start(int64_t segment) {
    if constexpr (!Score::kIsGiven) query_ = this->SegmentRow(this->query, segment, 0);
  }

  JB_INLINE void Add(int64_t row, int64_t edge) {
    const int64_t e = this->block.count++;
    if constexpr (!Score::kIsGiven) {
      this->block.queries[e] = query_;
      this->block.keys[e] = this->EdgeRow(this->key, row, e, 0);
    }
    this->block.values[e] = Score::kIsAdditive ? this->block.keys[e] : this->EdgeRow(this->value, row, e, 1);
    this->TakeBias(e, edge);
  }

  JB_INLINE void Fold(bool is_first) {
    this->FoldBlock(
        is_first,
        [&](const SegmentState<C>& state) { ForwardBlock(this->heads, this->block, this->buffers.logits, state); },
        [&](const SegmentState<C>& later, const SegmentState<C>& state) {
          MergeStates(this->num_heads, this->heads.head_features, later, state);
        });
  }

  JB_INLINE void Finish(int64_t segment) const {
    const SegmentState<C>& state = this->buffers.segment;
    DivideByTotals(this->num_heads, this->heads.head_features, state.totals, state.first_sums);
    WriteRow(state.first_sums, this->features, output_ + segment * this->features);
    std::copy_n(state.maxima, this->num_heads, new_maxima_ + segment * this->num_heads);
    std::copy_n(state.totals, this->num_heads, new_totals_ + segment * this->num_heads);
  }

  JB_INLINE void WriteEmpty(int64_t segment) const {
    WriteZeros(output_ + segment * this->features, this->features);
    std::fill_n(new_maxima_ + segment * this->num_heads, this->num_heads, kLowestLogit<C>);
    std::fill_n(new_totals_ + segment * this->num_heads, this->num_heads, C{0});
  }

  JB_INLINE void PrefetchEdge(int64_t row, int64_t edge) const {
    const bool has_both = !Score::kIsGiven && !Score::kIsAdditive;
    this->PrefetchRows(Score::kIsGiven ? this->value : this->key, has_both ? this->value : nullptr, row, edge);
  }

 private:
  T* const output_;
  C *const new_maxima_, *const new_totals_;
  const C* query_ = nullptr;
};

template <typename T, typename Score>
class BySegmentPass final : public AttentionPass<T, Score> {
 public:
  using C = ComputeType<T>;
  static constexpr bool kClips = true, kTakesRowlessEdges = false;

  BySegmentPass(const AttentionBySegmentCall& call, int64_t b, Buffers<C>* buffers)
      : AttentionPass<T, Score>(call, call.problem.segments, call.num_rows, b, buffers) {
    const int64_t cells = call.problem.segments * this->features;
    d_query_ = static_cast<T*>(call.d_query) + b * cells;
    if (call.d_bias != nullptr) d_bias_ = static_cast<C*>(call.d_bias) + b * call.problem.rows * this->num_heads;
    if constexpr (Score::kIsAdditive) d_score_weights_ = static_cast<C*>(call.d_score_weights) + b * cells;
  }

  JB_INLINE void Start(int64_t segment) {
    query_ = this->SegmentRow(this->query, segment, 0);
    d_output_ = this->SegmentRow(this->d_output, segment, 1);
    first_head_ = segment * this->num_heads;
  }

  JB_INLINE void Add(int64_t row, int64_t edge) {
    EdgeBlock<C>& block = this->block;
    const int64_t e = block.count++;
    block.queries[e] = query_;
    block.keys[e] = this->EdgeRow(this->key, row, e, 0);
    block.values[e] = Score::kIsAdditive ? block.keys[e] : this->EdgeRow(this->value, row, e, 1);
    block.d_outputs[e] = d_output_;
    block.maxima[e] = this->maxima + first_head_;
    block.totals[e] = this->totals + first_head_;
    block.means[e] = this->means + first_head_;
    this->block.edges[e] = edge;
    this->TakeBias(e, edge);
  }

  JB_INLINE void Fold(bool is_first) {
    const int64_t count = this->block.count;
    this->FoldBlock(
        is_first,
        [&](const SegmentState<C>& state) {
          BySegmentBlock(this->heads, this->block, this->buffers.logits, this->buffers.probabilities, state);
        },
        [&](const SegmentState<C>& later, const SegmentState<C>& state) {
          AddSums<Score::kIsAdditive>(this->features, later, state);
        });
    if (d_bias_ != nullptr) this->WriteLogitGradients(count, d_bias_);
  }

  JB_INLINE void Finish(int64_t segment) const {
    WriteRow(this->buffers.segment.first_sums, this->features, d_query_ + segment * this->features);
    if constexpr (Score::kIsAdditive) {
      std::copy_n(this->buffers.segment.second_sums, this->features, d_score_weights_ + segment * this->features);
    }
  }

  JB_INLINE void WriteEmpty(int64_t segment) const {
    WriteZeros(d_query_ + segment * this->features, this->features);
    if constexpr (Score::kIsAdditive) WriteZeros(d_score_weights_ + segment * this->features, this->features);
  }

  JB_INLINE void PrefetchEdge(int64_t row, int64_t edge) const {
    this->PrefetchRows(this->key, Score::kIsAdditive ? nullptr : this->value, row, edge);
  }

 private:
  T* d_query_;
  C *d_bias_ = nullptr, *d_score_weights_ = nullptr;
  const C *query_ = nullptr, *d_output_ = nullptr;
  int64_t first_head_ = 0;
};

template <typename T, typename Score>
class ByRowPass final : public AttentionPass<T, Score> {
 public:
  using C = ComputeType<T>;
  static constexpr bool kClips = false, kTakesRowlessEdges = Score::kIsGiven;

  ByRowPass(const AttentionByRowCall& call, int64_t b, Buffers<C>* buffers)
      : AttentionPass<T, Score>(call, call.num_rows, call.problem.segments, b, buffers) {
    const int64_t cells = call.problem.segments * this->features;
    if constexpr (!Score::kIsGiven) d_key_ = static_cast<T*>(call.d_key) + b * cells;
    if constexpr (!Score::kIsAdditive) d_value_ = static_cast<T*>(call.d_value) + b * cells;
    if constexpr (Score::kIsGiven) {
      d_bias_ = static_cast<C*>(call.d_bias) + b * call.problem.rows * this->num_heads;
      rows_of_edges_ = call.rows_of_edges.Of<int32_t>(b, call.problem.rows);
      num_rows_ = call.problem.segments;
    }
  }

  JB_INLINE void Start(int64_t segment) {
    if constexpr (!Score::kIsGiven) key_ = this->SegmentRow(this->key, segment, 0);
    value_ = Score::kIsAdditive ? key_ : this->SegmentRow(this->value, segment, 1);
  }

  JB_INLINE void StartRowless(int64_t edge) { Start(NearestRow(rows_of_edges_[edge], num_rows_)); }

  JB_INLINE void Add(int64_t row, int64_t edge) {
    EdgeBlock<C>& block = this->block;
    const int64_t e = block.count++, first_head = row * this->num_heads;
    if constexpr (!Score::kIsGiven) {
      block.queries[e] = this->EdgeRow(this->query, row, e, 0);
      block.keys[e] = key_;
    }
    block.values[e] = value_;
    block.d_outputs[e] = this->EdgeRow(this->d_output, row, e, 1);
    block.maxima[e] = this->maxima + first_head;
    block.totals[e] = this->totals + first_head;
    block.means[e] = this->means + first_head;
    block.edges[e] = edge;
    this->TakeBias(e, edge);
  }

  JB_INLINE void Fold(bool is_first) {
    const int64_t count = this->block.count;
    this->FoldBlock(
        is_first,
        [&](const SegmentState<C>& state) {
          ByRowBlock(this->heads, this->block, this->buffers.logits, this->buffers.probabilities, state);
        },
        [&](const SegmentState<C>& later, const SegmentState<C>& state) {
          AddSums<kHasSecondSums>(this->features, later, state);
        });
    if constexpr (Score::kIsGiven) this->WriteLogitGradients(count, d_bias_);
  }

  JB_INLINE void Finish(int64_t segment) const {
    const SegmentState<C>& state = this->buffers.segment;
    WriteRow(state.first_sums, this->features, (Score::kIsGiven ? d_value_ : d_key_) + segment * this->features);
    if constexpr (kHasSecondSums) WriteRow(state.second_sums, this->features, d_value_ + segment * this->features);
  }

  JB_INLINE void WriteEmpty(int64_t segment) const {
    if constexpr (!Score::kIsGiven) WriteZeros(d_key_ + segment * this->features, this->features);
    if constexpr (!Score::kIsAdditive) WriteZeros(d_value_ + segment * this->features, this->features);
  }

  JB_INLINE void PrefetchEdge(int64_t row, int64_t edge) const {
    this->PrefetchRows(this->d_output, Score::kIsGiven ? nullptr : this->query, row, edge);
    for (const C* statistic : {this->maxima, this->totals, this->means}) {
      __builtin_prefetch(statistic + row * this->num_heads);
    }
  }

 private:
  static constexpr bool kHasSecondSums = !Score::kIsAdditive && !Score::kIsGiven;

  T *d_key_ = nullptr, *d_value_ = nullptr;
  C* d_bias_ = nullptr;
  const C *key_ = nullptr, *value_ = nullptr;
  const int32_t* rows_of_edges_ = nullptr;
  int64_t num_rows_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// Chunks.

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

// Dropped edges may stand between those of a segment. If the ids are not sorted, edges of earlier segments are dropped.
template <typename Pass>
void RunChunk(const AttentionCall& call, int64_t batch, ChunkBorder begin, ChunkBorder end, Pass& pass) {
  const Problem& problem = call.problem;
  const int32_t* const gather_ids = OfElement(call.gather_ids, call.gather_ids_are_shared, batch, problem.rows);
  const EdgeNumbers numbers(call.edge_order, call.edge_order_is_shared, batch, problem.rows);
  const SegmentIds ids(call);
  const int64_t first_id = problem.IdIndex(batch, 0), segments = problem.segments;
  int64_t place = begin.place;
  for (int64_t segment = begin.segment; segment < end.segment; ++segment) {
    bool is_empty = true, is_first = true;
    for (; place < end.place; ++place) {
      const int64_t id = ids[first_id + place];
      if (id > segment && id < segments) break;
      const int64_t coming = place + kEdgePrefetchDistance;
      if (coming < end.place) pass.PrefetchEdge(NearestRow(gather_ids[coming], call.num_rows), numbers[coming]);
      if (id != segment || (!Pass::kClips && !IsBelow(gather_ids[place], call.num_rows))) continue;
      if (is_empty) pass.Start(segment);
      is_empty = false;
      pass.Add(NearestRow(gather_ids[place], call.num_rows), numbers[place]);
      if (pass.IsFull()) {
        pass.Fold(is_first);
        is_first = false;
      }
    }
    if (pass.HasEdges()) pass.Fold(is_first);
    if (is_empty) {
      pass.WriteEmpty(segment);
    } else {
      pass.Finish(segment);
    }
  }
  if constexpr (Pass::kTakesRowlessEdges) {
    // The last edges. Each may have a row of its own.
    for (place = end.place; place > begin.place && !IsBelow(ids[first_id + place - 1], segments); --place) {
      const int64_t row = gather_ids[place - 1], edge = numbers[place - 1];
      if (!IsBelow(row, call.num_rows)) continue;
      pass.StartRowless(edge);
      pass.Add(row, edge);
      pass.Fold(/*is_first=*/true);
    }
  }
}

// Returns false if memory allocation fails. kTakesGiven: whether the logits may be given.
template <template <typename, typename> class Pass, bool kTakesGiven, typename Call>
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
  const auto run = [&](auto type, auto score) {
    using T = typename decltype(type)::type;
    using C = ComputeType<T>;
    ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
      const int64_t b = index / chunks, list = problem.ids_are_shared ? 0 : b;
      const ChunkBorder* const border = borders.get() + list * (chunks + 1) + index % chunks;
      if (border[0].segment == border[1].segment) return;
      Buffers<C> buffers(call.heads, problem.features, kHoldsRows<T>);
      if (!buffers.has_memory()) {
        has_memory = false;
        return;
      }
      Pass<T, decltype(score)> pass(call, b, &buffers);
      RunChunk(call, b, border[0], border[1], pass);
    });
  };
  DispatchFloating(call.type, [&](auto type) {
    using C = ComputeType<typename decltype(type)::type>;
    DispatchScore<C, kTakesGiven>(call, [&](auto score) { run(type, score); });
  });
  return has_memory;
}

bool RunForward(ffi::ThreadPool& pool, const AttentionForwardCall& call) {
  const Problem& problem = call.problem;
  AdviseHugePages(call.output, problem.batch * problem.segments * problem.features * ElementBytes(call.type));
  return RunPass<ForwardPass, /*kTakesGiven=*/true>(pool, call);
}

// Dropped edges, and edges missing from an invalid order, get 0.
void ZeroBiasGradient(ffi::ThreadPool& pool, const AttentionCall& call, void* d_bias) {
  if (d_bias != nullptr) WriteZeroBytes(pool, d_bias, BiasBytes(call));
}

bool RunBySegment(ffi::ThreadPool& pool, const AttentionBySegmentCall& call) {
  const Problem& problem = call.problem;
  ZeroBiasGradient(pool, call, call.d_bias);
  AdviseHugePages(call.d_query, problem.batch * problem.segments * problem.features * ElementBytes(call.type));
  return RunPass<BySegmentPass, /*kTakesGiven=*/false>(pool, call);
}

bool RunByRow(ffi::ThreadPool& pool, const AttentionByRowCall& call) {
  const Problem& problem = call.problem;
  const int64_t bytes = problem.batch * problem.segments * problem.features * ElementBytes(call.type);
  for (void* const result : {call.d_key, call.d_value}) {
    if (result != nullptr) AdviseHugePages(result, bytes);
  }
  ZeroBiasGradient(pool, call, call.d_bias);
  return RunPass<ByRowPass, /*kTakesGiven=*/true>(pool, call);
}

template <typename Call, bool (*kRun)(ffi::ThreadPool&, const Call&)>
ffi::Error RunAttention(ffi::ThreadPool pool, const char* op, ffi::RemainingRets results, Call* call,
                        size_t num_decoded) {
  JB_RETURN_IF_ERROR(CheckSorted(op, *call));
  if (results.size() != num_decoded) return InvalidArgument(op, "scratch is among the results, expected none");
  return MemoryStatus(op, kRun(pool, *call));
}

Plan PlanAttention(const AttentionCall& call) { return {call.problem.HasNoResult() ? kNothing : "segments"}; }

constexpr ScoreKind kDot = ScoreKind::kDotProduct, kAdditive = ScoreKind::kAdditive, kGiven = ScoreKind::kGiven;
constexpr auto kRun = RunAttention<AttentionForwardCall, RunForward>;
constexpr auto kRunBySegment = RunAttention<AttentionBySegmentCall, RunBySegment>;
constexpr auto kRunByRow = RunAttention<AttentionByRowCall, RunByRow>;

constexpr auto kPlan = PlanOf<PlanAttention, AttentionCallOf<AttentionForwardCall>>;
constexpr auto kPlanBySegment = PlanOf<PlanAttention, AttentionCallOf<AttentionBySegmentCall>>;
constexpr auto kPlanByRow = PlanOf<PlanAttention, AttentionCallOf<AttentionByRowCall>>;

JB_CPU_TARGET(kForwardName<kDot>, (HandleAttention<ffi::ThreadPool, kDot, kRun>), BindAttention<ffi::ThreadPool>(),
              kPlan, kNothing, "segments");
JB_CPU_TARGET(kForwardName<kAdditive>, (HandleAttention<ffi::ThreadPool, kAdditive, kRun>),
              BindAttention<ffi::ThreadPool>(), kPlan, kNothing, "segments");
JB_CPU_TARGET(kForwardName<kGiven>, (HandleAttention<ffi::ThreadPool, kGiven, kRun>), BindAttention<ffi::ThreadPool>(),
              kPlan, kNothing, "segments");
JB_CPU_TARGET(kBySegmentName<kDot>, (HandleAttentionBySegment<ffi::ThreadPool, kDot, kRunBySegment>),
              BindAttentionBySegment<ffi::ThreadPool>(), kPlanBySegment, kNothing, "segments");
JB_CPU_TARGET(kBySegmentName<kAdditive>, (HandleAttentionBySegment<ffi::ThreadPool, kAdditive, kRunBySegment>),
              BindAttentionBySegment<ffi::ThreadPool>(), kPlanBySegment, kNothing, "segments");
JB_CPU_TARGET(kByRowName<kDot>, (HandleAttentionByRow<ffi::ThreadPool, kDot, kRunByRow>),
              BindAttentionByRow<ffi::ThreadPool>(), kPlanByRow, kNothing, "segments");
JB_CPU_TARGET(kByRowName<kAdditive>, (HandleAttentionByRow<ffi::ThreadPool, kAdditive, kRunByRow>),
              BindAttentionByRow<ffi::ThreadPool>(), kPlanByRow, kNothing, "segments");
JB_CPU_TARGET(kByRowName<kGiven>, (HandleAttentionByRow<ffi::ThreadPool, kGiven, kRunByRow>),
              BindAttentionByRow<ffi::ThreadPool>(), kPlanByRow, kNothing, "segments");

}  // namespace
}  // namespace jax_baracuda::segment
