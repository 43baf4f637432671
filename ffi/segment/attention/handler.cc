// The handlers of attention over edges and its gradients.
#include <string>
#include <type_traits>

#include "ffi/segment/attention/call.h"
#include "ffi/segment/decoding.h"

namespace jax_baracuda::segment {

struct AttentionOptions {
  int64_t num_batch_dims;
  bool indices_are_sorted, has_bias, has_edge_order;
  double scale, negative_slope;
};

}  // namespace jax_baracuda::segment

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::AttentionOptions, StructMember<int64_t>("num_batch_dims"),
                                      StructMember<bool>("indices_are_sorted"), StructMember<bool>("has_bias"),
                                      StructMember<bool>("has_edge_order"), StructMember<double>("scale"),
                                      StructMember<double>("negative_slope"));

namespace jax_baracuda::segment {
namespace {

template <ScoreKind kScore>
constexpr const char* kForwardName = kScore == ScoreKind::kDotProduct ? "graph_dot_product_attention"
                                     : kScore == ScoreKind::kAdditive ? "graph_additive_attention"
                                                                      : "segment_attention";
template <ScoreKind kScore>
constexpr const char* kBySegmentName =
    kScore == ScoreKind::kDotProduct ? "graph_dot_product_attention_d_query" : "graph_additive_attention_d_query";
template <ScoreKind kScore>
constexpr const char* kByRowName = kScore == ScoreKind::kDotProduct ? "graph_dot_product_attention_d_key"
                                   : kScore == ScoreKind::kAdditive ? "graph_additive_attention_d_key"
                                                                    : "segment_attention_backward";

// What the three handlers decode alike.
class AttentionDecoder {
 public:
  AttentionDecoder(const char* op, ScoreKind score, const AttentionOptions& options, AttentionCall* call)
      : op_(op), options_(options), call_(*call), decoder_(op, options.num_batch_dims, call) {
    call_.indices_are_sorted = options.indices_are_sorted;
    call_.score = score;
    call_.scale = options.scale;
    call_.negative_slope = options.negative_slope;
  }

  // The result that determines the batch, the edges, and the rows that they gather.
  ffi::Error Edges(const char* result_name, const ffi::AnyBuffer& result, const char* name,
                   const ffi::AnyBuffer& gathered, const ffi::AnyBuffer& gather_ids,
                   const ffi::AnyBuffer& segment_ids) {
    if (is_given() && !options_.has_bias) return InvalidArgument(op_, "has_bias is false, but the bias is the logits");
    JB_RETURN_IF_ERROR(decoder_.First(result_name, result, "rows, heads, features of a head"));
    JB_RETURN_IF_ERROR(decoder_.Ids(segment_ids));
    JB_RETURN_IF_ERROR(decoder_.Gathered(name, gathered, "gather_ids", gather_ids, &call_));
    JB_RETURN_IF_ERROR(decoder_.Heads(name, &call_.heads));
    call_.head_features = decoder_.features()[1];
    JB_RETURN_IF_ERROR(CheckKernel(op_, name, gathered, IsFloating(call_.type)));
    const int64_t width = call_.head_features, least = call_.MinHeadFeatures(), most = call_.MaxHeadFeatures();
    const bool fits = call_.heads == 0 || (width >= least && width <= most && (width & (width - 1)) == 0);
    if (kOnCuda && !fits) {
      return InvalidArgument(op_, std::string(name) + " has " + std::to_string(width) +
                                      " features of a head, expected a power of two from " + std::to_string(least) +
                                      " to " + std::to_string(most));
    }
    return CheckSorted(op_, call_);
  }

  // `is_there`: whether the call has this operand.
  ffi::Error NextRows(OptionalOperands* operands, const char* name, bool is_there, int64_t extent,
                      BatchOperand* operand) {
    return operands->Next(name, is_there,
                          [&](const ffi::AnyBuffer& buffer) { return Rows(name, buffer, extent, operand); });
  }

  // The optional operands that all handlers have. `rows`: the number of rows of the values.
  ffi::Error CommonOptional(OptionalOperands* operands, bool has_value, int64_t rows) {
    JB_RETURN_IF_ERROR(NextRows(operands, "value", has_value, rows, &call_.value));
    if (is_additive()) call_.value = call_.key;
    JB_RETURN_IF_ERROR(operands->Next("bias", options_.has_bias, [&](const ffi::AnyBuffer& bias) {
      return Array("bias", bias, wide_type(), call_.problem.rows, decoder_.features().first(1), &call_.bias);
    }));
    JB_RETURN_IF_ERROR(operands->Next("score_weights", is_additive(), [&](const ffi::AnyBuffer& weights) {
      return Array("score_weights", weights, decoder_.type(), call_.heads, decoder_.features().last(1),
                   &call_.score_weights);
    }));
    return decoder_.EdgeOrder(options_.has_edge_order, operands, &call_);
  }

  ffi::Error NextBiasGradient(OptionalResults* results, bool is_there, void** d_bias) {
    return results->Next("d_bias", is_there, [&](const ffi::AnyBuffer& buffer) {
      return decoder_.Array("d_bias", buffer, wide_type(), call_.problem.rows, decoder_.features().first(1), d_bias);
    });
  }

  // The softmax of a segment and what enters its gradient.
  ffi::Error Softmax(int64_t extent, const ffi::AnyBuffer& maxima, const ffi::AnyBuffer& totals,
                     const ffi::AnyBuffer& means) {
    JB_RETURN_IF_ERROR(Statistics("maxima", maxima, extent, &call_.maxima));
    JB_RETURN_IF_ERROR(Statistics("totals", totals, extent, &call_.totals));
    return Statistics("means", means, extent, &call_.means);
  }

  ffi::Error Rows(const char* name, const ffi::AnyBuffer& buffer, int64_t extent, BatchOperand* operand) {
    return Array(name, buffer, decoder_.type(), extent, decoder_.features(), operand);
  }

  bool is_additive() const { return call_.score == ScoreKind::kAdditive; }
  bool is_given() const { return call_.score == ScoreKind::kGiven; }
  ffi::DataType wide_type() const { return ComputeDataType(decoder_.type()); }
  Decoder& decoder() { return decoder_; }

 private:
  ffi::Error Statistics(const char* name, const ffi::AnyBuffer& buffer, int64_t extent, BatchOperand* operand) {
    return Array(name, buffer, wide_type(), extent, decoder_.features().first(1), operand);
  }
  ffi::Error Array(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t extent,
                   ffi::AnyBuffer::Dimensions features, BatchOperand* operand) {
    return decoder_.Array(name, buffer, type, extent, features, operand);
  }

  const char* op_;
  const AttentionOptions& options_;
  AttentionCall& call_;
  Decoder decoder_;
};

// The first operand has the rows that edges gather: keys, or values if the logits are given.
template <ScoreKind kScore>
ffi::Error HandleAttention(Context context, ffi::AnyBuffer gathered, ffi::AnyBuffer gather_ids,
                           ffi::AnyBuffer segment_ids, ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> output,
                           ffi::Result<ffi::AnyBuffer> maxima, ffi::Result<ffi::AnyBuffer> totals,
                           ffi::RemainingRets scratch, AttentionOptions options) {
  constexpr const char* kOp = kForwardName<kScore>;
  AttentionForwardCall call;
  AttentionDecoder attention(kOp, kScore, options, &call);
  Decoder& decoder = attention.decoder();
  constexpr bool kIsGiven = kScore == ScoreKind::kGiven;
  JB_RETURN_IF_ERROR(attention.Edges("output", *output, kIsGiven ? "value" : "key", gathered, gather_ids, segment_ids));
  (kIsGiven ? call.value : call.key) = {call.data, call.problem.data_is_shared};
  JB_RETURN_IF_ERROR(decoder.FirstCells("output", *output, decoder.type(), &call.output));
  const auto heads = decoder.features().first(1);
  const int64_t segments = call.problem.segments;
  OptionalOperands operands(kOp, optional);
  JB_RETURN_IF_ERROR(attention.NextRows(&operands, "query", !kIsGiven, segments, &call.query));
  JB_RETURN_IF_ERROR(attention.CommonOptional(&operands, kScore == ScoreKind::kDotProduct, call.num_rows));
  JB_RETURN_IF_ERROR(operands.End());
  JB_RETURN_IF_ERROR(decoder.Array("maxima", *maxima, attention.wide_type(), segments, heads, &call.new_maxima));
  JB_RETURN_IF_ERROR(decoder.Array("totals", *totals, attention.wide_type(), segments, heads, &call.new_totals));
  return RunCall(context, {kOp, scratch}, &call);
}

template <ScoreKind kScore>
ffi::Error HandleAttentionBySegment(Context context, ffi::AnyBuffer key, ffi::AnyBuffer query, ffi::AnyBuffer d_output,
                                    ffi::AnyBuffer maxima, ffi::AnyBuffer totals, ffi::AnyBuffer means,
                                    ffi::AnyBuffer gather_ids, ffi::AnyBuffer segment_ids, ffi::RemainingArgs optional,
                                    ffi::Result<ffi::AnyBuffer> d_query, ffi::RemainingRets more_results,
                                    AttentionOptions options) {
  constexpr const char* kOp = kBySegmentName<kScore>;
  AttentionBySegmentCall call;
  AttentionDecoder attention(kOp, kScore, options, &call);
  Decoder& decoder = attention.decoder();
  JB_RETURN_IF_ERROR(attention.Edges("d_query", *d_query, "key", key, gather_ids, segment_ids));
  call.key = {call.data, call.problem.data_is_shared};
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_query", *d_query, decoder.type(), &call.d_query));
  const int64_t segments = call.problem.segments;
  JB_RETURN_IF_ERROR(attention.Rows("query", query, segments, &call.query));
  JB_RETURN_IF_ERROR(attention.Rows("d_output", d_output, segments, &call.d_output));
  JB_RETURN_IF_ERROR(attention.Softmax(segments, maxima, totals, means));
  OptionalOperands operands(kOp, optional);
  JB_RETURN_IF_ERROR(attention.CommonOptional(&operands, kScore == ScoreKind::kDotProduct, call.num_rows));
  JB_RETURN_IF_ERROR(operands.End());
  OptionalResults results(kOp, more_results);
  JB_RETURN_IF_ERROR(attention.NextBiasGradient(&results, options.has_bias, &call.d_bias));
  JB_RETURN_IF_ERROR(
      results.Next("d_score_weights", kScore == ScoreKind::kAdditive, [&](const ffi::AnyBuffer& d_weights) {
        return decoder.Cells("d_score_weights", d_weights, attention.wide_type(), &call.d_score_weights);
      }));
  return RunCall(context, results, &call);
}

// The first result is the gradient of the keys, or of the values if the logits are given.
template <ScoreKind kScore>
ffi::Error HandleAttentionByRow(Context context, ffi::AnyBuffer d_output, ffi::AnyBuffer maxima, ffi::AnyBuffer totals,
                                ffi::AnyBuffer means, ffi::AnyBuffer gather_ids, ffi::AnyBuffer segment_ids,
                                ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> d_rows,
                                ffi::RemainingRets more_results, AttentionOptions options) {
  constexpr const char* kOp = kByRowName<kScore>;
  AttentionByRowCall call;
  AttentionDecoder attention(kOp, kScore, options, &call);
  Decoder& decoder = attention.decoder();
  constexpr bool kIsGiven = kScore == ScoreKind::kGiven, kIsAdditive = kScore == ScoreKind::kAdditive;
  const char* const d_name = kIsGiven ? "d_value" : "d_key";
  JB_RETURN_IF_ERROR(attention.Edges(d_name, *d_rows, "d_output", d_output, gather_ids, segment_ids));
  call.d_output = {call.data, call.problem.data_is_shared};
  JB_RETURN_IF_ERROR(decoder.FirstCells(d_name, *d_rows, decoder.type(), kIsGiven ? &call.d_value : &call.d_key));
  const int64_t rows = call.problem.segments, segments = call.num_rows;
  JB_RETURN_IF_ERROR(attention.Softmax(segments, maxima, totals, means));
  OptionalOperands operands(kOp, optional);
  JB_RETURN_IF_ERROR(attention.NextRows(&operands, "query", !kIsGiven, segments, &call.query));
  JB_RETURN_IF_ERROR(attention.NextRows(&operands, "key", !kIsGiven, rows, &call.key));
  JB_RETURN_IF_ERROR(attention.CommonOptional(&operands, !kIsAdditive, rows));
  JB_RETURN_IF_ERROR(operands.Next("rows_of_edges", kIsGiven, [&](const ffi::AnyBuffer& rows_of_edges) {
    return decoder.Vector("rows_of_edges", rows_of_edges, ffi::DataType::S32, call.problem.rows, &call.rows_of_edges);
  }));
  JB_RETURN_IF_ERROR(operands.End());
  OptionalResults results(kOp, more_results);
  JB_RETURN_IF_ERROR(results.Next("d_value", !kIsGiven && !kIsAdditive, [&](const ffi::AnyBuffer& d_value) {
    return decoder.Cells("d_value", d_value, decoder.type(), &call.d_value);
  }));
  JB_RETURN_IF_ERROR(attention.NextBiasGradient(&results, kIsGiven, &call.d_bias));
  return RunCall(context, results, &call);
}

// The call that plan parameters describe.
template <typename Call>
Call AttentionCallOf(const PlanParameters& parameters) {
  auto call = CallOf<Call>(parameters);
  call.num_rows = parameters.at("gathered_rows");
  call.heads = parameters.at("heads");
  call.head_features = call.heads == 0 ? 0 : call.problem.features / call.heads;
  return call;
}

constexpr ScoreKind kDot = ScoreKind::kDotProduct, kAdditive = ScoreKind::kAdditive, kGiven = ScoreKind::kGiven;
constexpr auto kPlan = PlanOf<AttentionCallOf<AttentionForwardCall>>;
constexpr auto kPlanBySegment = PlanOf<AttentionCallOf<AttentionBySegmentCall>>;
constexpr auto kPlanByRow = PlanOf<AttentionCallOf<AttentionByRowCall>>;

JB_TARGET(kForwardName<kDot>, HandleAttention<kDot>, kPlan, AttentionCall::Strategies());
JB_TARGET(kForwardName<kAdditive>, HandleAttention<kAdditive>, kPlan, AttentionCall::Strategies());
JB_TARGET(kForwardName<kGiven>, HandleAttention<kGiven>, kPlan, AttentionCall::Strategies());
JB_TARGET(kBySegmentName<kDot>, HandleAttentionBySegment<kDot>, kPlanBySegment, AttentionCall::Strategies());
JB_TARGET(kBySegmentName<kAdditive>, HandleAttentionBySegment<kAdditive>, kPlanBySegment, AttentionCall::Strategies());
JB_TARGET(kByRowName<kDot>, HandleAttentionByRow<kDot>, kPlanByRow, AttentionCall::Strategies());
JB_TARGET(kByRowName<kAdditive>, HandleAttentionByRow<kAdditive>, kPlanByRow, AttentionCall::Strategies());
JB_TARGET(kByRowName<kGiven>, HandleAttentionByRow<kGiven>, kPlanByRow, AttentionCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
