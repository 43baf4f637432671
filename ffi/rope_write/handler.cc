// The handler of rope_write.

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/core/arguments.h"
#include "ffi/core/batch.h"
#include "ffi/core/run.h"
#include "ffi/rope/decoding.h"
#include "ffi/rope_write/rope_write.h"
#include "ffi/write_rows/decoding.h"

namespace jax_baracuda::rope_write {
namespace {

// Operands are those of write_rows: the pools of keys and values, keys, values, slots, and the layer and scales if
// there are some. Then follow queries, frequencies and positions. Results are the pools and the queries.
class Decoder {
 public:
  explicit Decoder(Arguments& arguments) : arguments_(arguments) {}

  void Decode(Call* call) {
    write_rows::Decoder decoder(arguments_, kPools);
    decoder.Decode(&call->write);
    const int64_t axis = arguments_.Integer("axis");
    if (axis > 1) throw InvalidArgument("axis is " + std::to_string(axis) + ", expected 0 or 1");
    const Buffer q = arguments_.Operand("q"), frequencies = arguments_.Operand("frequencies");
    const Buffer positions = arguments_.Operand("positions");
    DecodeQueries(q, arguments_.Result("q_out"), call);
    CheckRows(decoder.rows(), call->problem);
    DecodeAngles(frequencies, positions, call);
    call->scale = arguments_.Float("scale");
  }

 private:
  static constexpr size_t kPools = 2;

  void DecodeQueries(const Buffer& q, const Buffer& q_out, Call* call) {
    batch_ = Batch(q_out, arguments_.Integer("num_batch_dims"), "rows, heads, features");
    const IntegerSpan dims = batch_.View(q_out, /*may_be_shared=*/false)->dims;
    if (dims.size() != 3 || dims[0] != call->write.rows || batch_.size() != call->write.batch) {
      throw batch_.WrongShape(q_out, /*may_be_shared=*/false, std::to_string(call->write.rows) + ",heads,features");
    }
    type_ = q_out.type;
    call->type = ElementTypeOf(type_);
    q_out.CheckKernel(IsFloating(call->type));
    call->queries = {batch_.Take(q, type_, {dims[0], dims[1], dims[2]}), q_out.data, dims[1]};
    rope::Problem& problem = call->problem;
    problem = rope::Problem{};
    problem.batch = batch_.size();
    problem.examples = 1;
    problem.length = dims[0];
    problem.features = dims[2];
    rope::DecodeRotated(arguments_, &problem);
  }

  // Keys and values have the type of queries, and keys their features.
  void CheckRows(const std::vector<Buffer>& keys_and_values, const rope::Problem& problem) const {
    const int64_t rank = arguments_.Integer("num_batch_dims") + 3;
    for (const Buffer& rows : keys_and_values) {
      rows.CheckType(type_);
      const bool fits = static_cast<int64_t>(rows.dims.size()) == rank &&
                        (rows.number != kKeys || rows.dims.back() == problem.features);
      if (!fits) throw rows.WrongShape("rows, heads, features");
    }
  }

  void DecodeAngles(const Buffer& frequencies, const Buffer& positions, Call* call) const {
    const rope::Problem& problem = call->problem;
    call->frequencies = rope::DecodeFrequencies(batch_, frequencies, type_, problem.pairs);
    const IntegerSpan sections = arguments_.Integers("sections");
    call->positions.sections = rope::DecodeSections(sections, arguments_.Flag("sections_interleaved"), problem.pairs);
    call->positions.are_shared_by_examples = true;
    rope::DecodePositions(batch_, positions, sections.size() > 0, {problem.length}, &call->positions);
  }

  Arguments& arguments_;
  Batch batch_;
  DataType type_ = XLA_FFI_DataType_INVALID;
};

void HandleRopeWrite(Arguments& arguments) {
  Call call{};
  Decoder(arguments).Decode(&call);
  Run(arguments, call);
}

// The call that the parameters of a plan describe, with one head of values.
Call CallOf(const PlanParameters& parameters) {
  Call call{};
  call.type = TypeOfWidth(parameters.at("element_bytes"), /*is_floating=*/true);
  call.problem.features = parameters.at("features");
  call.problem.pairs = parameters.at("rotary_dim") / 2;
  call.problem.first_rotated = parameters.at("rotary_offset");
  call.problem.interleaved = parameters.at("interleaved") != 0;
  write_rows::Pool values;
  values.number = kValues;
  values.inner = parameters.at("value_features");
  call.write.pools.push_back(values);
  return call;
}

JB_TARGET("rope_write", HandleRopeWrite, PlanOf<CallOf>, Call::Strategies());

}  // namespace
}  // namespace jax_baracuda::rope_write
