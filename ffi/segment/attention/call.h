// Calls of attention over edges and its gradients.
//
// The logit of an edge and a head is a score plus a bias. For the query q of the edge's segment and the key k of the row
// that it gathers, the score is
//   scale * sum(q * k)                                  dot products
//   sum(score_weights * leaky_relu(q + k))              additive; the keys are the values, too
//   nothing                                             given: the bias is the logit; there are no queries and keys
// Biases are in the accumulation type: a mask such as -1e9 is infinite in float16, and an edge's biases are few numbers
// beside the row that it gathers. The softmax over the edges of a segment is kept as the maximum of its logits and the
// total of exp(logit - maximum).
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

enum class ScoreKind { kDotProduct, kAdditive, kGiven };

struct AttentionCall : GatheringCall {
  int64_t heads = 0, head_features = 0;
  ScoreKind score = ScoreKind::kDotProduct;
  double scale = 1, negative_slope = 0;
  BatchOperand query, key, value;  // [batch or 1, segments or rows, heads, features of a head]
  BatchOperand bias;               // [batch or 1, edges, heads] in the accumulation type, or none
  BatchOperand score_weights;      // [batch or 1, heads, features of a head], if additive
  BatchOperand d_output;           // [batch or 1, segments, heads, features of a head]
  // [batch or 1, segments, heads] in the accumulation type. Means: sum(probability * d_probability) over the edges of a
  // segment.
  BatchOperand maxima, totals, means;
  BatchOperand rows_of_edges;  // int32 [batch or 1, edges], by the number of the edge; see AttentionByRowCall

  static std::vector<const char*> Strategies();

  // Heads for the CUDA kernels: a power of two of features, at most one vector for each thread of a warp. Python pads
  // others, and knows the bytes of the widest as MAX_HEAD_BYTES. Computed logits need at least a vector.
  int64_t MaxHeadFeatures() const { return 32 * 16 / ElementBytes(type); }
  int64_t MinHeadFeatures() const { return score == ScoreKind::kGiven ? 1 : 16 / ElementBytes(type); }
};

inline int64_t BiasBytes(const AttentionCall& call) {
  return call.problem.batch * call.problem.rows * call.heads * AccumulatorBytes(call.type);
}

// Edges gather keys and values.
struct AttentionForwardCall : AttentionCall {
  void* output = nullptr;      // [batch, segments, heads, features of a head]
  void* new_maxima = nullptr;  // [batch, segments, heads], in the accumulation type
  void* new_totals = nullptr;

  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// The gradient of what belongs to segments and edges, unless the logits are given. Edges gather keys and values.
struct AttentionBySegmentCall : AttentionCall {
  void* d_query = nullptr;  // [batch, segments, heads, features of a head]
  void* d_bias = nullptr;   // [batch, edges, heads] in the accumulation type, or none
  // [batch, segments, heads, features of a head] in the accumulation type, if additive: the terms of each segment
  void* d_score_weights = nullptr;

  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// The gradient of what belongs to rows. Here the rows of keys and values are the segments of the problem, and edges
// gather queries and cotangents of the output.
//
// The gradient of given logits is computed in the same pass, because both need these cotangents. An edge whose gather id
// was out of range has no row here: its segment id is the number of rows. Its logit has a gradient nevertheless, with the
// value of the row that is nearest to its element of rows_of_edges.
struct AttentionByRowCall : AttentionCall {
  void* d_key = nullptr;    // [batch, rows, heads, features of a head]; if additive, of the values, too. None if given
  void* d_value = nullptr;  // likewise, unless additive
  void* d_bias = nullptr;   // [batch, edges, heads] in the accumulation type, if given

  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

}  // namespace jax_baracuda::segment
