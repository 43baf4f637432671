// The CUDA kernel of rope for many rows, and the choice of the kernel.
//
// A thread owns a few neighbouring pairs of one position. It computes their sines and cosines once, and loops over the
// rows with this position: the heads, and other examples with the same angles. If there are few rows per position, it
// processes several positions.

#include <algorithm>
#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/core/device_attributes.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/strategies.h"
#include "ffi/core/vectors.cuh"
#include "ffi/rope/rope_device.cuh"
#include "ffi/rope/shared_angles.cuh"
#include "ffi/rope/tuning.h"

namespace jax_baracuda::rope {
namespace {

enum class Strategy {
  kNothing,
  kSharedAngles,  // the threads of a block share sines and cosines: for few rows
  kManyRows,
  kByElement,  // the kernel for many rows, for rows that vectors do not fit
};

constexpr const char* kStrategyNames[] = {"nothing", "shared_angles", "many_rows", "by_element"};

struct RopePlan {
  Strategy strategy = Strategy::kNothing;
  int64_t units = 0;            // per row
  int64_t units_of_thread = 0;  // 0: fewer units than threads
};

inline constexpr int kThreads = 128;
inline constexpr int kRowsInFlight = Tuning::kRowsInFlight;

// Maximum threads per group; thread indices have 32 bits.
inline constexpr int64_t kMaxThreads = int64_t{1} << 30;

// A tensor, and its assignment to threads. A group is a run of examples with the same angles, whose rows at one
// position have a constant stride. Thread indices of a group vary fastest over units, then lanes, positions and slabs.
// Lane i of a slab processes its rows i, i + lanes, i + 2 lanes, ...
template <typename T>
struct Rows {
  const T* x;
  T* y;
  bool x_is_shared;
  int64_t count;  // rows per group and position
  int rows_of_slab;
  Divider lanes, slabs;
  Divider first_positions;  // the number of first positions, and a thread's step from one position to the next
  // In elements.
  int64_t stride, lanes_stride;
  int64_t position_stride, step_stride;
  int64_t example_stride;
};

template <typename T>
struct Arguments {
  Rows<T> rows[kMaxTensors];
  unsigned blocks_of_first_rows;
  unsigned groups_of_blocks;  // groups per blockIdx.y
  int64_t groups, examples_of_group;
  bool has_batch;
  Divider examples;
  int64_t length;
  Divider units;  // per row
  RowLayout<int64_t> layout;
  BatchOperand frequencies;
  Positions positions;
  Rotation<AngleType<T>> scale;
};

template <typename T, int kCount, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) RotateRows(const __grid_constant__ Arguments<T> a) {
  using UnitOfRow = Unit<T, kCount, kInterleaved>;
  constexpr int kPairs = UnitOfRow::kPairs;
  const bool are_first = blockIdx.x < a.blocks_of_first_rows;
  const Rows<T>& rows = a.rows[are_first ? 0 : 1];
  const unsigned block = are_first ? blockIdx.x : blockIdx.x - a.blocks_of_first_rows;
  unsigned rest = block * kThreads + threadIdx.x;
  const auto take = [&](const Divider& by) {
    if (by.of_short.divisor == 1) return 0u;
    const unsigned quotient = by.of_short.Quotient(rest), remainder = by.of_short.Remainder(rest, quotient);
    rest = quotient;
    return remainder;
  };
  const unsigned unit = take(a.units), lane = take(rows.lanes), first_position = take(rows.first_positions);
  const int64_t first_row = static_cast<int64_t>(take(rows.slabs)) * rows.rows_of_slab;
  const int64_t group = static_cast<int64_t>(blockIdx.y) * a.groups_of_blocks + rest;
  if (rest >= a.groups_of_blocks || group >= a.groups) return;

  const int64_t example = group * a.examples_of_group, batch = a.has_batch ? a.examples.Quotient(example) : 0;
  const int64_t example_of_batch = a.has_batch ? example - batch * static_cast<int64_t>(a.examples.divisor) : example;
  const bool is_rotated = unit < a.layout.rotated_units;
  const auto at = UnitOfRow::Locate(a.layout, unit);
  const int64_t first_offset = example * rows.example_stride + (first_row + lane) * rows.stride +
                               first_position * rows.position_stride + at.feature;
  const T* first_x = rows.x + first_offset;
  if (rows.x_is_shared) first_x -= (example - example_of_batch) * rows.example_stride;
  T* first_y = rows.y + first_offset;
  const int lanes = static_cast<int>(rows.lanes.of_short.divisor);
  const int count = static_cast<int>(min(rows.count - first_row, static_cast<int64_t>(rows.rows_of_slab)));

  int64_t position = first_position;
  const T* x;
  T* y;
  int row;
  UnitOfRow units[kRowsInFlight];
  RawPosition raw_position;
  const auto load_units = [&] {
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (row + i * lanes < count) units[i].Load(x + i * rows.lanes_stride, at.partner_stride);
    }
  };
  const auto load_position = [&](int section) {
    const int64_t examples = static_cast<int64_t>(a.examples.divisor);
    RawPosition raw;
    raw.Load(a.positions, PositionsOf(a.positions, batch, examples, example_of_batch, section) * a.length, position);
    return raw;
  };
  const auto begin_position = [&] {
    x = first_x;
    y = first_y;
    row = static_cast<int>(lane);
    load_units();
    raw_position = load_position(0);
  };
  begin_position();
  double frequencies[kPairs] = {};
  if (is_rotated) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      RawFrequency<T> raw_frequency;
      raw_frequency.Load(a.frequencies, batch, a.layout.pairs, int64_t{unit} * kPairs + i);
      frequencies[i] = raw_frequency.Value();
    }
  }
  while (true) {
    Rotation<ComputeType<T>> rotations[kPairs];
    if (is_rotated) {
      double angles[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) angles[i] = raw_position.Value(a.positions) * frequencies[i];
      if (a.positions.sections.count > 1) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const int section = a.positions.sections.Of(static_cast<int>(unit) * kPairs + i);
          angles[i] = load_position(section).Value(a.positions) * frequencies[i];
        }
      }
      ComputeRotations<T>(angles, a.scale, rotations);
    }
    while (true) {
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        if (row + i * lanes < count) {
          if (is_rotated) units[i].Rotate(rotations);
          units[i].Store(y + i * rows.lanes_stride, at.partner_stride);
        }
      }
      row += kRowsInFlight * lanes;
      if (row >= count) break;
      x += kRowsInFlight * rows.lanes_stride;
      y += kRowsInFlight * rows.lanes_stride;
      load_units();
    }
    position += rows.first_positions.of_short.divisor;
    if (position >= a.length) return;
    first_x += rows.step_stride;
    first_y += rows.step_stride;
    begin_position();
  }
}

// Input of AssignRows that is common to all tensors.
struct Assignment {
  bool heads_are_neighbours;  // the heads of a position are adjacent in memory
  int64_t examples_of_group;
  int64_t units;  // per row
  int64_t units_of_thread;
};

// Returns the number of threads per group.
template <typename T>
int64_t AssignRows(const Problem& problem, const Tensor& tensor, const Assignment& assignment, Rows<T>* rows) {
  rows->x = static_cast<const T*>(tensor.x.data);
  rows->y = static_cast<T*>(tensor.y);
  rows->x_is_shared = tensor.x.is_shared;
  rows->count = assignment.examples_of_group * tensor.heads;
  if (rows->count == 0) return 0;
  const int64_t max_lanes =
      assignment.heads_are_neighbours ? CeilDivide(Tuning::kContiguousThreads, assignment.units) : 1;
  const int64_t lanes = std::clamp<int64_t>(rows->count / assignment.units_of_thread, 1, max_lanes);
  const int64_t slabs = CeilDivide(rows->count, assignment.units_of_thread * lanes);
  const int64_t rows_of_thread = CeilDivide(rows->count, slabs * lanes);
  const int64_t threads_of_position = assignment.units * lanes * slabs;
  const int64_t positions_of_thread =
      std::max(std::clamp<int64_t>(assignment.units_of_thread / rows_of_thread, 1, problem.length),
               CeilDivide(threads_of_position * problem.length, kMaxThreads));
  const int64_t first_positions = CeilDivide(problem.length, positions_of_thread);
  rows->rows_of_slab = static_cast<int>(rows_of_thread * lanes);
  rows->lanes = Divider(lanes);
  rows->slabs = Divider(slabs);
  rows->first_positions = Divider(first_positions);
  rows->stride = problem.features * (assignment.heads_are_neighbours ? 1 : problem.length);
  rows->lanes_stride = rows->stride * lanes;
  rows->position_stride = problem.features * (problem.heads_first ? 1 : tensor.heads);
  rows->step_stride = rows->position_stride * first_positions;
  rows->example_stride = tensor.heads * problem.length * problem.features;
  return threads_of_position * first_positions;
}

template <typename T, int kCount, bool kInterleaved>
CudaStatus Launch(const Call& call, const RopePlan& plan, cudaStream_t stream) {
  using UnitOfRow = Unit<T, kCount, kInterleaved>;
  const Problem& problem = call.problem;
  if constexpr (kCount > 1) {
    if (plan.strategy == Strategy::kSharedAngles)
      return LaunchWithSharedAngles<T, kCount, kInterleaved>(call, plan.units, stream);
  }
  bool have_one_head = true, is_x_shared = false;
  for (int i = 0; i < call.num_tensors; ++i) {
    have_one_head = have_one_head && call.tensors[i].heads == 1;
    is_x_shared = is_x_shared || call.tensors[i].x.is_shared;
  }
  const int64_t examples = problem.batch * problem.examples;
  Arguments<T> a{};
  const bool heads_are_neighbours = problem.length == 1 || !(problem.heads_first || have_one_head);
  const bool have_rows_one_distance = problem.length == 1 || !heads_are_neighbours;
  a.examples_of_group = !call.ExamplesShareAngles() || !have_rows_one_distance ? 1
                        : call.BatchSharesAngles() && !is_x_shared             ? examples
                                                                               : problem.examples;
  a.groups = examples / a.examples_of_group;
  a.has_batch = problem.batch > 1;
  a.examples = Divider(problem.examples);
  a.length = problem.length;
  a.units = Divider(plan.units);
  a.layout = RowLayout<int64_t>(problem, UnitOfRow::kPairs);
  a.frequencies = call.frequencies;
  a.positions = call.positions;
  a.scale = ScaleOf<T>(call);

  const Assignment assignment{heads_are_neighbours, a.examples_of_group, plan.units,
                              std::max<int64_t>(plan.units_of_thread, 1)};
  int64_t threads[kMaxTensors] = {};
  for (int i = 0; i < call.num_tensors; ++i) {
    // The last tensor is assigned first: it is k, whose threads have longer latency chains because it has fewer heads.
    threads[i] = AssignRows(problem, call.tensors[call.num_tensors - 1 - i], assignment, &a.rows[i]);
  }
  const int64_t most_threads = std::max(threads[0], threads[1]);
  const int64_t groups_of_blocks = std::clamp<int64_t>(kMaxThreads / most_threads, 1, a.groups);
  const int64_t first_blocks = CeilDivide(threads[0] * groups_of_blocks, kThreads);
  const int64_t second_blocks = CeilDivide(threads[1] * groups_of_blocks, kThreads);
  const int64_t y_of_blocks = CeilDivide(a.groups, groups_of_blocks);
  if (most_threads >= 2 * kMaxThreads) return JB_CUDA_STATUS(cudaErrorInvalidConfiguration);
  a.groups_of_blocks = static_cast<unsigned>(groups_of_blocks);
  a.blocks_of_first_rows = static_cast<unsigned>(first_blocks);
  const dim3 blocks(GridSize(first_blocks + second_blocks), GridSize(y_of_blocks));
  RotateRows<T, kCount, kInterleaved><<<blocks, kThreads, 0, stream>>>(a);
  return JB_LAUNCH_STATUS(RotateRows);
}

RopePlan Choose(const Call& call, int64_t multiprocessors) {
  RopePlan plan;
  if (call.HasNoElement()) return plan;
  bool are_aligned = true, is_in_place = true;
  for (int i = 0; i < call.num_tensors; ++i) {
    const Tensor& tensor = call.tensors[i];
    are_aligned = are_aligned && AreAligned(kVectorBytes, tensor.x.data, tensor.y);
    is_in_place = is_in_place && tensor.x.data == tensor.y && tensor.y != nullptr;  // calls without data are not
  }
  const Problem& problem = call.problem;
  const int64_t all_heads = call.AllHeads(), element_bytes = ElementBytes(call.type);
  const int64_t elements_of_vector = kVectorBytes / element_bytes;
  const bool has_vectors = are_aligned && problem.HasVectors(elements_of_vector);
  const int64_t elements_of_unit = !has_vectors ? 2 : problem.interleaved ? elements_of_vector : 2 * elements_of_vector;
  const int64_t copied_features = is_in_place ? 0 : problem.features - 2 * problem.pairs;
  plan.units = 2 * problem.pairs / elements_of_unit + CeilDivide(copied_features, elements_of_unit);
  const int64_t all_units = plan.units * problem.batch * problem.examples * all_heads * problem.length;
  plan.units_of_thread = std::min(all_units / (multiprocessors * Tuning::kMinThreads), Tuning::kMaxUnits);
  const bool shares_angles =
      plan.units_of_thread < Tuning::kMaxUnits && MayShareAngles(problem, all_heads, element_bytes, plan.units);
  plan.strategy = !has_vectors ? Strategy::kByElement : shares_angles ? Strategy::kSharedAngles : Strategy::kManyRows;
  return plan;
}

}  // namespace

std::vector<const char*> Call::Strategies() { return {JB_NAMES(kStrategyNames)}; }

Plan Call::MakePlan() const {
  return {NameOf(kStrategyNames, Choose(*this, DeviceAttributesForPlan().multiprocessors).strategy)};
}

CudaStatus Call::Run(cudaStream_t stream) const {
  int multiprocessors;
  JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
  const RopePlan plan = Choose(*this, multiprocessors);
  if (plan.strategy == Strategy::kNothing) return {};
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = kVectorBytes / sizeof(T);
    const auto launch = plan.strategy == Strategy::kByElement ? Launch<T, 1, false>
                        : problem.interleaved                 ? Launch<T, kVec, true>
                                                              : Launch<T, kVec, false>;
    return launch(*this, plan, stream);
  });
}

}  // namespace jax_baracuda::rope
