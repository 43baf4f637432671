// The handlers of attention over edges and its gradients.
#include <string>

#include "ffi/segment/attention/call.h"
#include "ffi/segment/decoding.h"

namespace jax_baracuda::segment {
namespace {

// What the three handlers decode alike.
class AttentionDecoder {
 public:
  AttentionDecoder(Arguments& arguments, ScoreKind score, AttentionCall* call)
      : arguments_(arguments), has_bias_(arguments.Flag("has_bias")), call_(*call), decoder_(arguments, call) {
    call_.indices_are_sorted = arguments.Flag("indices_are_sorted");
    call_.score = score;
    call_.scale = arguments.Float("scale");
    call_.negative_slope = arguments.Float("negative_slope");
  }

  // The result that determines the batch, the edges, and the rows that they gather.
  void Edges(const Buffer& result, const Buffer& gathered, const Buffer& gather_ids, const Buffer& segment_ids) {
    if (is_given() && !has_bias_) throw InvalidArgument("has_bias is false, but the bias is the logits");
    decoder_.First(result, "rows, heads, features of a head");
    decoder_.Edges(gathered, gather_ids, segment_ids, &call_);
    decoder_.Heads(gathered, &call_.heads);
    call_.head_features = decoder_.features()[1];
    gathered.CheckKernel(IsFloating(call_.type));
    const int64_t width = call_.head_features, least = call_.MinHeadFeatures(), most = call_.MaxHeadFeatures();
    const bool fits = call_.heads == 0 || (width >= least && width <= most && (width & (width - 1)) == 0);
    if (kOnCuda && !fits) {
      throw gathered.Wrong("has " + std::to_string(width) + " features of a head, expected a power of two from " +
                           std::to_string(least) + " to " + std::to_string(most));
    }
    CheckSorted(call_);
  }

  // The last operands, which all handlers have. `rows`: the number of rows of the values.
  void LastOperands(bool has_value, int64_t rows) {
    if (has_value) Rows(arguments_.Operand("value"), rows, &call_.value);
    if (is_additive()) call_.value = call_.key;
    if (has_bias_) OfHeads(arguments_.Operand("bias"), call_.problem.rows, &call_.bias);
    if (is_additive()) {
      decoder_.Array(arguments_.Operand("score_weights"), decoder_.type(), call_.heads, decoder_.features().last(1),
                     &call_.score_weights);
    }
    decoder_.EdgeOrder(arguments_, &call_);
  }

  // The softmax of a segment and what enters its gradient.
  void Softmax(int64_t extent, const Buffer& maxima, const Buffer& totals, const Buffer& means) {
    OfHeads(maxima, extent, &call_.maxima);
    OfHeads(totals, extent, &call_.totals);
    OfHeads(means, extent, &call_.means);
  }

  // [.., extent, heads, features of a head].
  void Rows(const Buffer& buffer, int64_t extent, BatchOperand* operand) {
    decoder_.Array(buffer, decoder_.type(), extent, decoder_.features(), operand);
  }

  // [.., extent, heads] of the compute type.
  template <typename To>
  void OfHeads(const Buffer& buffer, int64_t extent, To* data) {
    decoder_.Array(buffer, wide_type(), extent, decoder_.features().first(1), data);
  }

  bool has_bias() const { return has_bias_; }
  bool is_additive() const { return call_.score == ScoreKind::kAdditive; }
  bool is_given() const { return call_.score == ScoreKind::kGiven; }
  DataType wide_type() const { return ComputeDataType(decoder_.type()); }
  Decoder& decoder() { return decoder_; }

 private:
  Arguments& arguments_;
  const bool has_bias_;
  AttentionCall& call_;
  Decoder decoder_;
};

// The first operand has the rows that edges gather: keys, or values if the logits are given.
template <ScoreKind kScore>
void HandleAttention(Arguments& arguments) {
  constexpr bool kIsGiven = kScore == ScoreKind::kGiven;
  const Buffer gathered = arguments.Operand(kIsGiven ? "value" : "key");
  const Buffer gather_ids = arguments.Operand("gather_ids"), segment_ids = arguments.Operand("segment_ids");
  const Buffer output = arguments.Result("output");
  const Buffer maxima = arguments.Result("maxima"), totals = arguments.Result("totals");
  AttentionForwardCall call;
  AttentionDecoder attention(arguments, kScore, &call);
  Decoder& decoder = attention.decoder();
  attention.Edges(output, gathered, gather_ids, segment_ids);
  (kIsGiven ? call.value : call.key) = {call.data, call.problem.data_is_shared};
  decoder.FirstCells(output, decoder.type(), &call.output);
  const int64_t segments = call.problem.segments;
  if (!kIsGiven) attention.Rows(arguments.Operand("query"), segments, &call.query);
  attention.LastOperands(kScore == ScoreKind::kDotProduct, call.num_rows);
  attention.OfHeads(maxima, segments, &call.new_maxima);
  attention.OfHeads(totals, segments, &call.new_totals);
  RunWithScratch(arguments, &call);
}

template <ScoreKind kScore>
void HandleAttentionBySegment(Arguments& arguments) {
  const Buffer key = arguments.Operand("key"), query = arguments.Operand("query");
  const Buffer d_output = arguments.Operand("d_output"), maxima = arguments.Operand("maxima");
  const Buffer totals = arguments.Operand("totals"), means = arguments.Operand("means");
  const Buffer gather_ids = arguments.Operand("gather_ids"), segment_ids = arguments.Operand("segment_ids");
  const Buffer d_query = arguments.Result("d_query");
  AttentionBySegmentCall call;
  AttentionDecoder attention(arguments, kScore, &call);
  Decoder& decoder = attention.decoder();
  attention.Edges(d_query, key, gather_ids, segment_ids);
  call.key = {call.data, call.problem.data_is_shared};
  decoder.FirstCells(d_query, decoder.type(), &call.d_query);
  const int64_t segments = call.problem.segments;
  attention.Rows(query, segments, &call.query);
  attention.Rows(d_output, segments, &call.d_output);
  attention.Softmax(segments, maxima, totals, means);
  attention.LastOperands(kScore == ScoreKind::kDotProduct, call.num_rows);
  if (attention.has_bias()) attention.OfHeads(arguments.Result("d_bias"), call.problem.rows, &call.d_bias);
  if (attention.is_additive()) {
    decoder.Cells(arguments.Result("d_score_weights"), attention.wide_type(), &call.d_score_weights);
  }
  RunWithScratch(arguments, &call);
}

// The first result is the gradient of the keys, or of the values if the logits are given.
template <ScoreKind kScore>
void HandleAttentionByRow(Arguments& arguments) {
  constexpr bool kIsGiven = kScore == ScoreKind::kGiven, kIsAdditive = kScore == ScoreKind::kAdditive;
  const Buffer d_output = arguments.Operand("d_output"), maxima = arguments.Operand("maxima");
  const Buffer totals = arguments.Operand("totals"), means = arguments.Operand("means");
  const Buffer gather_ids = arguments.Operand("gather_ids"), segment_ids = arguments.Operand("segment_ids");
  const Buffer d_rows = arguments.Result(kIsGiven ? "d_value" : "d_key");
  AttentionByRowCall call;
  AttentionDecoder attention(arguments, kScore, &call);
  Decoder& decoder = attention.decoder();
  attention.Edges(d_rows, d_output, gather_ids, segment_ids);
  call.d_output = {call.data, call.problem.data_is_shared};
  decoder.FirstCells(d_rows, decoder.type(), kIsGiven ? &call.d_value : &call.d_key);
  const int64_t rows = call.problem.segments, segments = call.num_rows;
  attention.Softmax(segments, maxima, totals, means);
  if (!kIsGiven) {
    attention.Rows(arguments.Operand("query"), segments, &call.query);
    attention.Rows(arguments.Operand("key"), rows, &call.key);
  }
  attention.LastOperands(!kIsAdditive, rows);
  if (kIsGiven) {
    decoder.Vector(arguments.Operand("rows_of_edges"), XLA_FFI_DataType_S32, call.problem.rows, &call.rows_of_edges);
    attention.OfHeads(arguments.Result("d_bias"), call.problem.rows, &call.d_bias);
  } else if (!kIsAdditive) {
    decoder.Cells(arguments.Result("d_value"), decoder.type(), &call.d_value);
  }
  RunWithScratch(arguments, &call);
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

JB_TARGET("graph_dot_product_attention", HandleAttention<kDot>, kPlan, AttentionCall::Strategies());
JB_TARGET("graph_additive_attention", HandleAttention<kAdditive>, kPlan, AttentionCall::Strategies());
JB_TARGET("segment_attention", HandleAttention<kGiven>, kPlan, AttentionCall::Strategies());
JB_TARGET("graph_dot_product_attention_d_query", HandleAttentionBySegment<kDot>, kPlanBySegment,
          AttentionCall::Strategies());
JB_TARGET("graph_additive_attention_d_query", HandleAttentionBySegment<kAdditive>, kPlanBySegment,
          AttentionCall::Strategies());
JB_TARGET("graph_dot_product_attention_d_key", HandleAttentionByRow<kDot>, kPlanByRow, AttentionCall::Strategies());
JB_TARGET("graph_additive_attention_d_key", HandleAttentionByRow<kAdditive>, kPlanByRow, AttentionCall::Strategies());
JB_TARGET("segment_attention_backward", HandleAttentionByRow<kGiven>, kPlanByRow, AttentionCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
