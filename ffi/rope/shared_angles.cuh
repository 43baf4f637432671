// The CUDA kernel of rope for few rows, as in decoding, which is latency-bound. A block processes rows of one position,
// or of a few positions if rows are short, and its threads share their sines and cosines. The kernel arguments are
// compact, because loading them adds latency too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/rope/rope_device.cuh"
#include "ffi/rope/tuning.h"

namespace jax_baracuda::rope {

inline constexpr int kMaxSharingThreads = 256;  // per block

// Strides are in elements.
template <typename T>
struct RowsOfTensor {
  const T* x;
  T* y;
  unsigned heads;
  int stride;
  int position_stride;
  int example_stride;
  bool x_is_shared;
};

template <typename T>
struct SharedAnglesArguments {
  RowsOfTensor<T> rows[kMaxTensors];
  unsigned blocks_of_first_rows;
  bool has_batch;
  bool positions_are_neighbours;  // adjacent in memory; otherwise heads are
  int length;
  ShortDivider tiles, examples;  // tiles: blocks along the positions of an example
  RowLayout<int> layout;
  BatchOperand frequencies;
  Positions positions;
  Rotation<AngleType<T>> scale;
};

// Blocks: rows along x; tiles of positions, then examples, along y. Threads: units along x; then whichever of positions
// and rows is adjacent in memory along y, and the other one along z.
template <typename T, int kCount, bool kInterleaved>
__global__ void __launch_bounds__(kMaxSharingThreads)
    RotateWithSharedAngles(const __grid_constant__ SharedAnglesArguments<T> a) {
  using UnitOfRow = Unit<T, kCount, kInterleaved>;
  using C = ComputeType<T>;
  extern __shared__ uint4 shared_memory[];

  const unsigned rows_of_block = a.positions_are_neighbours ? blockDim.z : blockDim.y;
  const unsigned positions_of_block = a.positions_are_neighbours ? blockDim.y : blockDim.z;
  const unsigned row_of_block = a.positions_are_neighbours ? threadIdx.z : threadIdx.y;
  const unsigned position_of_block = a.positions_are_neighbours ? threadIdx.y : threadIdx.z;
  auto* const rotations = reinterpret_cast<Rotation<C>*>(shared_memory) + position_of_block * a.layout.pairs;

  const bool are_first = blockIdx.x < a.blocks_of_first_rows;
  const RowsOfTensor<T>& rows = a.rows[are_first ? 0 : 1];
  const unsigned block = are_first ? blockIdx.x : blockIdx.x - a.blocks_of_first_rows;
  const unsigned unit = threadIdx.x, row = block * rows_of_block + row_of_block;
  const unsigned example = a.tiles.Quotient(blockIdx.y);
  const int position = a.tiles.Remainder(blockIdx.y, example) * positions_of_block + position_of_block;
  const int batch = a.has_batch ? a.examples.Quotient(example) : 0;
  const int example_of_batch = a.examples.Remainder(example, batch);
  const bool exists = position < a.length, has_row = exists && row < rows.heads;

  // Issue all loads before the first result is used.
  const int threads_of_position = blockDim.x * rows_of_block;
  int pair = exists ? static_cast<int>(row_of_block * blockDim.x + unit) : a.layout.pairs;
  RawFrequency<T> raw_frequency{};
  if (pair < a.layout.pairs) raw_frequency.Load(a.frequencies, batch, a.layout.pairs, pair);
  const auto at = UnitOfRow::Locate(a.layout, unit);
  const int offset = row * rows.stride + position * rows.position_stride + at.feature;
  UnitOfRow values;
  if (has_row) {
    values.Load(rows.x + (rows.x_is_shared ? example_of_batch : example) * rows.example_stride + offset,
                at.partner_stride);
  }
  RawPosition raw_position{};
  const auto load_position = [&] {
    const int row = PositionsOf(a.positions, batch, static_cast<int>(a.examples.divisor), example_of_batch,
                                a.positions.sections.Of(pair));
    raw_position.Load(a.positions, row * a.length, position);
  };
  if (pair < a.layout.pairs) load_position();

  while (pair < a.layout.pairs) {
    double angle[1] = {raw_position.Value(a.positions) * raw_frequency.Value()};
    ComputeRotations<T>(angle, a.scale, rotations + pair);
    pair += threads_of_position;
    if (pair >= a.layout.pairs) break;
    raw_frequency.Load(a.frequencies, batch, a.layout.pairs, pair);
    if (a.positions.sections.count > 1) load_position();
  }
  __syncthreads();
  if (!has_row) return;
  if (unit < a.layout.rotated_units) {
    Rotation<C> of_unit[UnitOfRow::kPairs];
    const auto vector = reinterpret_cast<const Vector<C, 2 * UnitOfRow::kPairs>*>(rotations)[unit];
    memcpy(of_unit, &vector, sizeof(of_unit));
    values.Rotate(of_unit);
  }
  values.Store(rows.y + example * rows.example_stride + offset, at.partner_stride);
}

// Whether the grid and the table fit, and element indices fit in 32 bits. `units`: units per row.
inline bool MayShareAngles(const Problem& problem, int64_t all_heads, int64_t element_bytes, int64_t units) {
  const int64_t places = problem.batch * problem.examples * problem.length;
  const int64_t rotation_bytes = 2 * std::max<int64_t>(element_bytes, sizeof(float));
  return units <= kMaxSharingThreads && places <= 65535 && places * all_heads * problem.features < int64_t{1} << 31 &&
         problem.pairs * rotation_bytes <= Tuning::kMaxTableBytes;
}

template <typename T, int kCount, bool kInterleaved>
CudaStatus LaunchWithSharedAngles(const Call& call, int64_t units, cudaStream_t stream) {
  const Problem& problem = call.problem;
  SharedAnglesArguments<T> a{};
  a.has_batch = problem.batch > 1;
  a.positions_are_neighbours = problem.heads_first;
  a.length = static_cast<int>(problem.length);
  a.examples = ShortDivider(problem.examples);
  a.layout = RowLayout<int>(problem, Unit<T, kCount, kInterleaved>::kPairs);
  a.frequencies = call.frequencies;
  a.positions = call.positions;
  a.scale = ScaleOf<T>(call);
  int64_t most_heads = 1;
  for (int i = 0; i < call.num_tensors; ++i) most_heads = std::max(most_heads, call.tensors[i].heads);
  constexpr int64_t kMaxAlongZ = 64;  // CUDA's limit of threads along z
  const int64_t rotation_bytes = problem.pairs * sizeof(Rotation<ComputeType<T>>);
  const int64_t rows_of_block =
      std::clamp<int64_t>(Tuning::kSharingThreads / units, 1, std::min(most_heads, kMaxAlongZ));
  const int64_t positions_of_block =
      std::clamp<int64_t>(std::min({Tuning::kSharingThreads / (units * rows_of_block), kMaxAlongZ,
                                    Tuning::kMaxTableBytes / rotation_bytes}),
                          1, problem.length);
  const int64_t tiles = CeilDivide(problem.length, positions_of_block);
  a.tiles = ShortDivider(tiles);
  const int64_t along_y = problem.heads_first ? positions_of_block : rows_of_block;
  const dim3 threads(static_cast<unsigned>(units), static_cast<unsigned>(along_y),
                     static_cast<unsigned>(rows_of_block * positions_of_block / along_y));
  dim3 blocks(0, GridSize(problem.batch * problem.examples * tiles));
  const int features = static_cast<int>(problem.features), length = static_cast<int>(problem.length);
  for (int i = 0; i < call.num_tensors; ++i) {
    const Tensor& tensor = call.tensors[i];
    const int heads = static_cast<int>(tensor.heads);
    a.rows[i] = {static_cast<const T*>(tensor.x.data),
                 static_cast<T*>(tensor.y),
                 static_cast<unsigned>(heads),
                 problem.heads_first ? length * features : features,
                 problem.heads_first ? features : heads * features,
                 heads * length * features,
                 tensor.x.is_shared};
    blocks.x = GridSize(blocks.x + CeilDivide(heads, rows_of_block));
    if (i == 0) a.blocks_of_first_rows = blocks.x;
  }
  const size_t table_bytes = positions_of_block * rotation_bytes;
  RotateWithSharedAngles<T, kCount, kInterleaved><<<blocks, threads, table_bytes, stream>>>(a);
  return JB_LAUNCH_STATUS(RotateWithSharedAngles);
}

}  // namespace jax_baracuda::rope
