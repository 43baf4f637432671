// The plans of the causal_conv1d ops on GPUs.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/tuning.h"
#include "ffi/core/alignment.h"
#include "ffi/core/integers.h"
#include "ffi/core/warp.cuh"

namespace jax_baracuda::causal_conv1d {
namespace {

// Minimises the modelled time over tile lengths and group sizes.
RowsPlan PlanRows(const Problem& problem, int64_t element_bytes, const RowsChoice& choice) {
  RowsPlan plan{};
  const int64_t vec = kVectorBytes / element_bytes, sector = kSectorBytes / element_bytes;
  // The maximum distance from the start of a sector to the start of a row in it.
  const int64_t most_before = sector - std::gcd(problem.length, sector);
  const int64_t vectors = std::max<int64_t>(CeilDivide(most_before + problem.length, vec), 1);
  const int64_t rows = problem.batch * problem.examples * problem.channels;
  const double warps_at_once = Tuning::kMultiprocessors * choice.blocks_at_once * (kRowsThreads / kWarpThreads);
  double least = std::numeric_limits<double>::infinity();
  for (int narrowing = 0; narrowing <= 3; ++narrowing) {
    const int64_t row_steps = CeilDivide(vectors, int64_t{kWarpThreads} >> narrowing);
    const int64_t row_warps = CeilDivide(rows, int64_t{1} << narrowing);
    for (int64_t wanted = std::min<int64_t>(row_steps, choice.max_steps);; wanted -= wanted > 8 ? 2 : 1) {
      const int64_t tiles = CeilDivide(row_steps, wanted), steps = CeilDivide(row_steps, tiles);
      const double time = (static_cast<double>(row_warps * tiles) + Tuning::kTailOfLaunch * warps_at_once) *
                          (static_cast<double>(steps) + choice.steps_to_start) * choice.slowness[narrowing];
      if (time < least) {
        least = time;
        plan = {kWarpThreads >> narrowing, 5 - narrowing, static_cast<int>(steps), tiles, row_warps * tiles};
      }
      if (wanted <= choice.min_steps) break;
    }
  }
  return plan;
}

// The widest vector of channels that stays aligned in every row of channels-last arrays.
int ChannelVector(int64_t channels, int64_t element_bytes) {
  return channels % WidestChannels(element_bytes) == 0 ? WidestChannels(element_bytes) : 1;
}

// Blocks take about equally long, so they run in waves, and a partial last wave costs as much as a full one. Chooses
// the run length that minimises the total cost of the waves.
ChannelsLastPlan PlanChannelsLast(const Problem& problem, int64_t element_bytes, const RunChoice& choice) {
  constexpr int64_t kMaxWaves = 16;
  const int64_t vectors = CeilDivide(problem.channels, ChannelVector(problem.channels, element_bytes));
  ChannelsLastPlan plan{};
  plan.lanes = 32;
  while (plan.lanes > 4 && plan.lanes / 2 >= vectors) plan.lanes /= 2;
  plan.runs = kChannelsLastThreads / plan.lanes;
  plan.run = choice.max_run;
  const int64_t blocks_across = problem.batch * problem.examples * CeilDivide(vectors, plan.lanes);
  const int64_t at_once = Tuning::kMultiprocessors * choice.blocks_at_once;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t waves = 1; waves <= kMaxWaves; ++waves) {
    const int64_t down = std::max<int64_t>(waves * at_once / blocks_across, 1);
    const int64_t run = std::max<int64_t>(CeilDivide(problem.length, down * plan.runs), choice.min_run);
    if (run > choice.max_run) continue;
    const int64_t blocks = blocks_across * CeilDivide(problem.length, run * plan.runs);
    const int64_t work = CeilDivide(blocks, at_once) * (run + Tuning::kTimesToStart);
    if (work >= least) continue;
    least = work;
    plan.run = static_cast<int>(run);
  }
  plan.blocks_down = CeilDivide(problem.length, int64_t{plan.run} * plan.runs);
  return plan;
}

// `is_shared`: whether the batch shares an array of x's shape. `is_aligned`: whether all arrays of x's shape are.
ConvolutionPlan PlanOf(const ConvolutionCall& call, bool is_shared, bool is_aligned, const RowsChoice& rows,
                       const RunChoice& runs) {
  const Problem& problem = call.problem;
  const int64_t element_bytes = ElementBytes(call.type);
  ConvolutionPlan plan;
  if (problem.HasNoElement()) return plan;
  if (problem.channels_last) {
    plan.channels_last = PlanChannelsLast(problem, element_bytes, runs);
    is_aligned = is_aligned && AreAligned(kVectorBytes, call.weight.data, call.bias.data) &&
                 ChannelVector(problem.channels, element_bytes) > 1;
    plan.strategy = is_aligned ? Strategy::kChannelsLast : Strategy::kChannelsLastByElement;
    plan.parts = problem.examples * plan.channels_last.blocks_down;
  } else {
    plan.rows = PlanRows(problem, element_bytes, rows);
    // Vectors must have the same position within a sector in every operand as in the result. Kernels for rows load
    // weights and biases element by element, so those need no alignment.
    const int64_t batch_bytes = problem.examples * problem.channels * problem.length * element_bytes;
    is_aligned = is_aligned && !(is_shared && problem.batch > 1 && batch_bytes % kSectorBytes != 0);
    plan.strategy = is_aligned ? Strategy::kRows : Strategy::kRowsByElement;
    plan.parts = problem.examples * plan.rows.tiles;
  }
  return plan;
}

}  // namespace

ConvolutionPlan PlanOf(const OutputCall& call) {
  const int element_bytes = static_cast<int>(ElementBytes(call.type));
  return PlanOf(call, call.x.is_shared, AreAligned(kVectorBytes, call.x.data, call.y),
                Tuning::ForwardRows(element_bytes, call.problem.has_same_sequence), Tuning::ForwardRun(element_bytes));
}

ConvolutionPlan PlanOf(const BackwardCall& call) {
  const Problem& problem = call.problem;
  const int64_t element_bytes = ElementBytes(call.type);
  ConvolutionPlan plan = PlanOf(call, call.x.is_shared || call.d_output.is_shared,
                                AreAligned(kVectorBytes, call.x.data, call.d_output.data, call.dx),
                                Tuning::BackwardRows(element_bytes, problem.has_same_sequence), Tuning::BackwardRun());
  plan.scratch_bytes =
      problem.batch * plan.parts * problem.channels * (problem.width + 1) * AccumulatorBytes(call.type);
  return plan;
}

ConvolutionPlan PlanOf(const UpdateCall& call) {
  const Problem& problem = call.problem;
  ConvolutionPlan plan;
  if (problem.batch == 0 || problem.examples == 0 || problem.channels == 0) return plan;
  const bool is_aligned = AreAligned(kVectorBytes, call.x.data, call.initial_state.data, call.weight.data,
                                     call.bias.data, call.y, call.new_state);
  const int64_t channels_of_thread = Tuning::kUpdateBytes / ElementBytes(call.type);
  const bool is_one = is_aligned && problem.length == 1 && problem.channels % channels_of_thread == 0 &&
                      call.state_length <= problem.width;
  plan.strategy = is_one                                    ? Strategy::kOneInput
                  : problem.length <= Tuning::kMaxFewInputs ? Strategy::kFewInputs
                                                            : Strategy::kManyInputs;
  return plan;
}

ConvolutionPlan PlanOf(const PoolUpdateCall& call) {
  const Problem& problem = call.problem;
  ConvolutionPlan plan;
  if (problem.HasNoElement()) return plan;
  const int64_t channels_of_thread = Tuning::kUpdateBytes / ElementBytes(call.type);
  const bool is_aligned =
      AreAligned(kVectorBytes, call.x.data, call.pool.data, call.weight.data, call.bias.data, call.y);
  const bool has_vectors = is_aligned && channels_of_thread > 1 && problem.channels % channels_of_thread == 0 &&
                           problem.width <= kMaxConstantWidth && call.pool.length == problem.width - 1 &&
                           call.num_accepted.data == nullptr && (problem.channels_last || problem.length == 1);
  plan.strategy = has_vectors ? Strategy::kPoolVectors : Strategy::kPoolByElement;
  return plan;
}

std::vector<const char*> ForwardCall::Strategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kRows, Strategy::kRowsByElement, Strategy::kChannelsLast,
                 Strategy::kChannelsLastByElement);
}

std::vector<const char*> BackwardCall::Strategies() { return ForwardCall::Strategies(); }

std::vector<const char*> UpdateCall::Strategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kOneInput, Strategy::kFewInputs, Strategy::kManyInputs);
}

std::vector<const char*> RaggedCall::Strategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kChannelsLast, Strategy::kChannelsLastByElement);
}

std::vector<const char*> PoolUpdateCall::Strategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kPoolVectors, Strategy::kPoolByElement);
}

Plan ForwardCall::MakePlan() const { return PlanOf(*this).Summary(); }
Plan BackwardCall::MakePlan() const { return PlanOf(*this).Summary(); }
Plan UpdateCall::MakePlan() const { return PlanOf(*this).Summary(); }
Plan RaggedCall::MakePlan() const { return PlanOf(*this).Summary(); }
Plan PoolUpdateCall::MakePlan() const { return PlanOf(*this).Summary(); }

}  // namespace jax_baracuda::causal_conv1d
