// The handlers of graph_attention and its gradients.
#pragma once

#include <string>

#include "ffi/segment/attention/call.h"
#include "ffi/segment/decoding.h"

namespace jax_baracuda::segment {

struct AttentionOptions {
  int64_t num_batch_dims;
  bool indices_are_sorted, is_additive, has_bias, has_edge_order;
  double scale, negative_slope;
};

}  // namespace jax_baracuda::segment

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::AttentionOptions, StructMember<int64_t>("num_batch_dims"),
                                      StructMember<bool>("indices_are_sorted"), StructMember<bool>("is_additive"),
                                      StructMember<bool>("has_bias"), StructMember<bool>("has_edge_order"),
                                      StructMember<double>("scale"), StructMember<double>("negative_slope"));

namespace jax_baracuda::segment {

// What the three handlers decode alike. Optional operands are values (unless additive), bias, score weights (if
// additive) and the order of the edges.
class AttentionDecoder {
 public:
  AttentionDecoder(const char* op, const AttentionOptions& options, AttentionCall* call)
      : op_(op), options_(options), call_(*call), decoder_(op, options.num_batch_dims, call) {
    call_.indices_are_sorted = options.indices_are_sorted;
    call_.is_additive = options.is_additive;
    call_.scale = options.scale;
    call_.negative_slope = options.negative_slope;
  }

  // The result that determines the batch, the edges, and the rows that they gather.
  ffi::Error Edges(const char* result_name, const ffi::AnyBuffer& result, const char* name,
                   const ffi::AnyBuffer& gathered, const ffi::AnyBuffer& gather_ids,
                   const ffi::AnyBuffer& segment_ids) {
    JB_RETURN_IF_ERROR(decoder_.First(result_name, result, "rows, heads, features of a head"));
    JB_RETURN_IF_ERROR(decoder_.Ids(segment_ids));
    JB_RETURN_IF_ERROR(decoder_.Gathered(name, gathered, "gather_ids", gather_ids, &call_));
    JB_RETURN_IF_ERROR(decoder_.Heads(name, &call_.heads));
    call_.head_features = decoder_.features()[1];
    JB_RETURN_IF_ERROR(CheckKernel(op_, name, gathered, DispatchFloating(call_.type, [](auto) {})));
    const int64_t max_features = call_.MaxHeadFeatures(), width = call_.head_features;
    if (width != 0 && (width > max_features || (width & (width - 1)) != 0 || width * ElementBytes(call_.type) < 16)) {
      return InvalidArgument(op_, std::string(name) + " has " + std::to_string(width) +
                                      " features of a head, expected a power of two from 16 bytes up to " +
                                      std::to_string(max_features) + " features");
    }
    return ffi::Error::Success();
  }

  // The operands that the optional ones follow. `extent`: the number of rows of the values.
  ffi::Error Optional(ffi::RemainingArgs optional, int64_t extent) {
    OptionalOperands operands(op_, optional);
    JB_RETURN_IF_ERROR(operands.Next("value", !options_.is_additive, [&](const ffi::AnyBuffer& value) {
      return Rows("value", value, extent, &call_.value);
    }));
    if (options_.is_additive) call_.value = call_.key;
    JB_RETURN_IF_ERROR(operands.Next("bias", options_.has_bias, [&](const ffi::AnyBuffer& bias) {
      return Array("bias", bias, decoder_.type(), call_.problem.rows, decoder_.features().first(1), &call_.bias);
    }));
    JB_RETURN_IF_ERROR(operands.Next("score_weights", options_.is_additive, [&](const ffi::AnyBuffer& weights) {
      return Array("score_weights", weights, decoder_.type(), call_.heads, decoder_.features().last(1),
                   &call_.score_weights);
    }));
    JB_RETURN_IF_ERROR(operands.Next("edge_order", options_.has_edge_order, [&](const ffi::AnyBuffer& edge_order) {
      return decoder_.EdgeIds("edge_order", edge_order, &call_.edge_order, &call_.edge_order_is_shared);
    }));
    return operands.End();
  }

  // The softmax of a segment and what enters its gradient.
  ffi::Error Softmax(int64_t extent, const ffi::AnyBuffer& d_output, const ffi::AnyBuffer& maxima,
                     const ffi::AnyBuffer& totals, const ffi::AnyBuffer& means) {
    JB_RETURN_IF_ERROR(Rows("d_output", d_output, extent, &call_.d_output));
    JB_RETURN_IF_ERROR(Statistics("maxima", maxima, extent, &call_.maxima));
    JB_RETURN_IF_ERROR(Statistics("totals", totals, extent, &call_.totals));
    return Statistics("means", means, extent, &call_.means);
  }

  ffi::Error Rows(const char* name, const ffi::AnyBuffer& buffer, int64_t extent, AttentionOperand* operand) {
    return Array(name, buffer, decoder_.type(), extent, decoder_.features(), operand);
  }

  ffi::DataType wide_type() const { return ComputeDataType(decoder_.type()); }
  Decoder& decoder() { return decoder_; }

 private:
  ffi::Error Statistics(const char* name, const ffi::AnyBuffer& buffer, int64_t extent, AttentionOperand* operand) {
    return Array(name, buffer, wide_type(), extent, decoder_.features().first(1), operand);
  }
  ffi::Error Array(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t extent,
                   ffi::AnyBuffer::Dimensions features, AttentionOperand* operand) {
    return decoder_.Array(name, buffer, type, extent, features, &operand->data, &operand->is_shared);
  }

  const char* op_;
  const AttentionOptions& options_;
  AttentionCall& call_;
  Decoder decoder_;
};

template <typename Context, auto kRun>
ffi::Error HandleAttention(Context context, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer gather_ids,
                           ffi::AnyBuffer segment_ids, ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> output,
                           ffi::Result<ffi::AnyBuffer> maxima, ffi::Result<ffi::AnyBuffer> totals,
                           ffi::RemainingRets scratch, AttentionOptions options) {
  constexpr const char* kOp = "graph_attention";
  AttentionForwardCall call;
  AttentionDecoder attention(kOp, options, &call);
  Decoder& decoder = attention.decoder();
  JB_RETURN_IF_ERROR(attention.Edges("output", *output, "key", key, gather_ids, segment_ids));
  call.key = {call.data, call.problem.data_is_shared};
  JB_RETURN_IF_ERROR(decoder.FirstCells("query", query, decoder.type(), &call.query.data, &call.query.is_shared));
  JB_RETURN_IF_ERROR(attention.Optional(optional, call.num_rows));
  JB_RETURN_IF_ERROR(decoder.Cells("output", *output, decoder.type(), &call.output));
  const auto heads = decoder.features().first(1);
  const int64_t segments = call.problem.segments;
  JB_RETURN_IF_ERROR(decoder.Array("maxima", *maxima, attention.wide_type(), segments, heads, &call.new_maxima));
  JB_RETURN_IF_ERROR(decoder.Array("totals", *totals, attention.wide_type(), segments, heads, &call.new_totals));
  return kRun(context, kOp, scratch, &call, 0);
}

template <typename Context, auto kRun>
ffi::Error HandleAttentionBySegment(Context context, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer d_output,
                                    ffi::AnyBuffer maxima, ffi::AnyBuffer totals, ffi::AnyBuffer means,
                                    ffi::AnyBuffer gather_ids, ffi::AnyBuffer segment_ids, ffi::RemainingArgs optional,
                                    ffi::Result<ffi::AnyBuffer> d_query, ffi::RemainingRets more_results,
                                    AttentionOptions options) {
  constexpr const char* kOp = "graph_attention_backward_by_segment";
  AttentionBySegmentCall call;
  AttentionDecoder attention(kOp, options, &call);
  Decoder& decoder = attention.decoder();
  JB_RETURN_IF_ERROR(attention.Edges("d_query", *d_query, "key", key, gather_ids, segment_ids));
  call.key = {call.data, call.problem.data_is_shared};
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_query", *d_query, decoder.type(), &call.d_query));
  const int64_t segments = call.problem.segments;
  JB_RETURN_IF_ERROR(attention.Rows("query", query, segments, &call.query));
  JB_RETURN_IF_ERROR(attention.Softmax(segments, d_output, maxima, totals, means));
  JB_RETURN_IF_ERROR(attention.Optional(optional, call.num_rows));
  OptionalResults results(kOp, more_results);
  JB_RETURN_IF_ERROR(results.Next("d_bias", options.has_bias, [&](const ffi::AnyBuffer& d_bias) {
    return decoder.Array("d_bias", d_bias, decoder.type(), call.problem.rows, decoder.features().first(1),
                         &call.d_bias);
  }));
  JB_RETURN_IF_ERROR(results.Next("d_score_weights", options.is_additive, [&](const ffi::AnyBuffer& d_weights) {
    return decoder.Cells("d_score_weights", d_weights, attention.wide_type(), &call.d_score_weights);
  }));
  return kRun(context, kOp, more_results, &call, results.num_decoded());
}

template <typename Context, auto kRun>
ffi::Error HandleAttentionByRow(Context context, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer d_output,
                                ffi::AnyBuffer maxima, ffi::AnyBuffer totals, ffi::AnyBuffer means,
                                ffi::AnyBuffer gather_ids, ffi::AnyBuffer segment_ids, ffi::RemainingArgs optional,
                                ffi::Result<ffi::AnyBuffer> d_key, ffi::RemainingRets more_results,
                                AttentionOptions options) {
  constexpr const char* kOp = "graph_attention_backward_by_row";
  AttentionByRowCall call;
  AttentionDecoder attention(kOp, options, &call);
  Decoder& decoder = attention.decoder();
  JB_RETURN_IF_ERROR(attention.Edges("d_key", *d_key, "query", query, gather_ids, segment_ids));
  call.query = {call.data, call.problem.data_is_shared};
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_key", *d_key, decoder.type(), &call.d_key));
  const int64_t rows = call.problem.segments;
  JB_RETURN_IF_ERROR(attention.Rows("key", key, rows, &call.key));
  JB_RETURN_IF_ERROR(attention.Softmax(call.num_rows, d_output, maxima, totals, means));
  JB_RETURN_IF_ERROR(attention.Optional(optional, rows));
  OptionalResults results(kOp, more_results);
  JB_RETURN_IF_ERROR(results.Next("d_value", !options.is_additive, [&](const ffi::AnyBuffer& d_value) {
    return decoder.Cells("d_value", d_value, decoder.type(), &call.d_value);
  }));
  return kRun(context, kOp, more_results, &call, results.num_decoded());
}

template <typename Context>
auto BindAttention() {
  return BindWithOptionalOperands<Context, 4, 3>().RemainingRets().template Attrs<AttentionOptions>();
}

template <typename Context>
auto BindAttentionBackward() {
  return BindWithOptionalOperands<Context, 8, 1>().RemainingRets().template Attrs<AttentionOptions>();
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

}  // namespace jax_baracuda::segment
