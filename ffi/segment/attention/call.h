// Calls of graph_attention and its gradients.
//
// The logit of an edge and a head is, for the query q of the edge's segment and the key k of the row that it gathers,
//   scale * sum(q * k) + bias                                  dot products
//   sum(score_weights * leaky_relu(q + k)) + bias              additive; the keys are the values, too
// The softmax over the edges of a segment is kept as the maximum of its logits and the total of exp(logit - maximum).
#pragma once

#include <cstdint>

#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// An operand that the batch may share, or that is absent.
struct AttentionOperand {
  const void* data = nullptr;
  bool is_shared = false;

  // The operand of a batch element, of which each has this size.
  template <typename T>
  JB_HOST_DEVICE const T* Of(int64_t batch, int64_t size) const {
    return data == nullptr || is_shared ? static_cast<const T*>(data) : static_cast<const T*>(data) + batch * size;
  }
};

struct AttentionCall : GatheringCall {
  int64_t heads = 0, head_features = 0;
  bool is_additive = false;
  double scale = 1, negative_slope = 0;
  AttentionOperand query, key, value;  // [batch or 1, segments or rows, heads, features of a head]
  AttentionOperand bias;               // [batch or 1, edges, heads], or none
  AttentionOperand score_weights;      // [batch or 1, heads, features of a head], if additive
  AttentionOperand d_output;           // like query
  // [batch or 1, segments, heads] in the accumulation type. Means: sum(probability * d_probability) over the edges of a
  // segment.
  AttentionOperand maxima, totals, means;

  // The features of a head are a power of two up to this number: at most one vector for each thread of a warp.
  int64_t MaxHeadFeatures() const { return 32 * 16 / ElementBytes(type); }
};

// Edges gather keys and values.
struct AttentionForwardCall : AttentionCall {
  void* output = nullptr;      // [batch, segments, heads, features of a head]
  void* new_maxima = nullptr;  // [batch, segments, heads], in the accumulation type
  void* new_totals = nullptr;

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

// The gradient of what belongs to segments and edges. Edges gather keys and values.
struct AttentionBySegmentCall : AttentionCall {
  void* d_query = nullptr;  // [batch, segments, heads, features of a head]
  void* d_bias = nullptr;   // [batch, edges, heads], or none
  // [batch, segments, heads, features of a head] in the accumulation type, if additive: the terms of each segment
  void* d_score_weights = nullptr;

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

// The gradient of what belongs to rows. Here the rows of keys are the segments of the problem, and edges gather queries.
struct AttentionByRowCall : AttentionCall {
  void* d_key = nullptr;    // [batch, rows, heads, features of a head]; if additive, of the values, too
  void* d_value = nullptr;  // likewise, unless additive

  Plan CudaPlan() const;
  CudaStatus LaunchOnCuda(cudaStream_t stream) const;
};

}  // namespace jax_baracuda::segment
