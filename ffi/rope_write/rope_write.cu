// The CUDA kernel of rope_write. One launch rotates queries and keys, and writes keys and values to their pools.
//
// A block takes a tile: some consecutive rows of queries, keys or values, or a part of one long row. Its threads share
// the sines and cosines of these rows. As in write_rows, a block of keys or values looks up which of its rows have the
// slot of a later row. Meanwhile the features of its rows are on their way.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/core/device_attributes.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/launch_bounds.cuh"
#include "ffi/core/vectors.cuh"
#include "ffi/rope/rope_device.cuh"
#include "ffi/rope_write/rope_write.cuh"
#include "ffi/write_rows/rows_device.cuh"
#include "ffi/write_rows/write_rows.cuh"

namespace jax_baracuda::rope_write {
namespace {

using rope::Rotation;
using write_rows::Format;
using write_rows::kThreads;
using write_rows::RowBits;

inline constexpr int kUnitsInFlight = 4;            // per thread
inline constexpr int kBlocksPerMultiprocessor = 3;  // minimum resident blocks, which caps the registers
inline constexpr int kMaxUnitsOfThread = 4;         // of queries; tiles of keys and values may be larger
inline constexpr int64_t kSlotTilesPerMultiprocessor = 4;
inline constexpr int64_t kMaxTableBytes = 32768;  // of sines and cosines

// Keys and values come first, because their blocks take longer than those of queries.
enum PartNumber { kKeyPart, kValuePart, kQueryPart, kParts };

// Queries, keys or values: [batch, rows, heads, features]. Strides are in elements of the destination.
template <typename T>
struct Part {
  const T* rows;
  void* dest;
  const float* scales;  // the divisors of the numbers; nullptr: 1
  bool rows_are_shared, scales_are_shared, has_scale_per_head;
  bool has_slots;  // otherwise rows are written to the same place in the destination
  bool converts;
  Format to;
  int rows_of_tile;
  uint32_t tiles_of_row, tiles_of_batch_element;
  int64_t num_tiles;  // of the whole batch
  int64_t units_of_row;
  ShortDivider units_of_tile;  // of one row
  ShortDivider units_of_head;
  rope::RowLayout<int64_t> layout;                       // values have no rotated units
  int64_t heads, row_stride, head_stride, layer_stride;  // layer_stride: of a batch element in queries
};

template <typename T>
struct Arguments {
  Part<T> parts[kParts];
  const int32_t *slot_of_row, *layer;
  bool slot_of_row_is_shared, layer_is_shared, has_unique_slots;
  int64_t layers, slots, rows;
  ShortDivider pairs;
  rope::Frequencies frequencies;
  rope::Positions positions;
  Rotation<rope::AngleType<T>> scale;
};

// A position and a frequency on their way.
template <typename T>
struct RawAngle {
  rope::RawPosition position;
  rope::RawFrequency<T> frequency;

  __device__ __forceinline__ void Load(const Arguments<T>& a, int64_t batch, int64_t row, int pair) {
    const int64_t of_row =
        rope::PositionsOf<int64_t>(a.positions, batch, /*examples=*/1, /*example=*/0, a.positions.sections.Of(pair));
    position.Load(a.positions, of_row * a.rows, row);
    frequency.Load(a.frequencies, batch, static_cast<int64_t>(a.pairs.divisor), int64_t{pair});
  }

  __device__ __forceinline__ double Value(const Arguments<T>& a) const {
    return position.Value(a.positions) * frequency.Value();
  }
};

// Stores a unit as numbers of another type. `scale`: nullptr for 1.
template <typename T, int kCount, typename Unit>
__device__ __forceinline__ void StoreConverted(const Unit& unit, const Part<T>& part, const float* scale, int64_t to,
                                               int64_t partner_stride) {
  if constexpr (sizeof(T) < sizeof(double)) {
#pragma unroll
    for (int vector = 0; vector < Unit::kVectors; ++vector) {
      float numbers[kCount];
      Widen<T, kCount>(unit.words[vector], numbers);
      if (scale != nullptr) {
        const float divisor = *scale;
#pragma unroll
        for (float& number : numbers) number = __fdiv_rn(number, divisor);
      }
      write_rows::DispatchPool(part.to, [&](auto tag) {
        using To = typename decltype(tag)::type;
        write_rows::StoreNumbers<To, kCount>(numbers, static_cast<To*>(part.dest) + to + vector * partner_stride);
      });
    }
  }
}

template <typename T, int kCount, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, MinBlocks(kThreads, kBlocksPerMultiprocessor))
    RotateAndWrite(const __grid_constant__ Arguments<T> a) {
  using UnitOfRow = rope::Unit<T, kCount, kInterleaved>;
  using RotationOfPair = Rotation<ComputeType<T>>;
  extern __shared__ uint4 shared_memory[];
  __shared__ write_rows::TileRows tile_rows;
  auto* const rotations = reinterpret_cast<RotationOfPair*>(shared_memory);  // of each row of the tile

  int64_t block = blockIdx.x;
  int number = 0;
  while (number < kParts - 1 && block >= a.parts[number].num_tiles) block -= a.parts[number++].num_tiles;
  const Part<T>& part = a.parts[number];
  const uint32_t batch = static_cast<uint32_t>(block) / part.tiles_of_batch_element;
  const uint32_t tile = static_cast<uint32_t>(block) - batch * part.tiles_of_batch_element;
  const uint32_t group = tile / part.tiles_of_row;
  const int64_t first_row = int64_t{group} * part.rows_of_tile;
  const int64_t first_unit = int64_t{tile - group * part.tiles_of_row} * part.units_of_tile.divisor;
  const int num_rows = static_cast<int>(min(int64_t{part.rows_of_tile}, a.rows - first_row));
  const uint32_t num_units = static_cast<uint32_t>(num_rows) * part.units_of_tile.divisor;
  const int thread = static_cast<int>(threadIdx.x);

  // Issue all loads before the first result is used.
  const write_rows::Slots slots{a.slot_of_row + (a.slot_of_row_is_shared ? 0 : batch * a.rows), a.rows, a.slots};
  int32_t own_slots[write_rows::kSlotsPerThread];
  int64_t layer = 0;
  if (part.has_slots) {
#pragma unroll
    for (int i = 0; i < write_rows::kSlotsPerThread; ++i) {
      own_slots[i] = slots.Load(first_row + thread + i * kThreads);
    }
    if (a.layer != nullptr) layer = a.layer[a.layer_is_shared ? 0 : batch];
  }
  const int num_angles = part.layout.rotated_units == 0 ? 0 : num_rows * static_cast<int>(a.pairs.divisor);
  const auto load_angle = [&](int i) {
    const uint32_t row = a.pairs.Quotient(static_cast<uint32_t>(i));
    RawAngle<T> raw;
    raw.Load(a, batch, first_row + row, static_cast<int>(a.pairs.Remainder(static_cast<uint32_t>(i), row)));
    return raw;
  };
  RawAngle<T> raw_angle{};
  if (thread < num_angles) raw_angle = load_angle(thread);

  struct Place {
    uint32_t row;
    int64_t head;
    unsigned unit;  // of the head
    bool exists;
  };
  const auto place_of = [&](uint32_t i) {
    const uint32_t row = part.units_of_tile.Quotient(i);
    const int64_t unit_of_row = first_unit + part.units_of_tile.Remainder(i, row);
    const uint32_t head = part.units_of_head.Quotient(static_cast<uint32_t>(unit_of_row));
    return Place{row, head, part.units_of_head.Remainder(static_cast<uint32_t>(unit_of_row), head),
                 i < num_units && unit_of_row < part.units_of_row};
  };
  const int64_t first_dest = (part.has_slots ? batch * a.layers + layer : batch) * part.layer_stride;
  const int64_t first_source = (part.rows_are_shared ? 0 : batch * a.rows) + first_row;

  RowBits overwritten = 0;
#pragma unroll 1
  for (uint32_t begin = threadIdx.x; begin < RoundUp(num_units, kThreads); begin += kUnitsInFlight * kThreads) {
    UnitOfRow units[kUnitsInFlight];
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      const Place place = place_of(begin + i * kThreads);
      if (!place.exists) continue;
      const auto at = UnitOfRow::Locate(part.layout, place.unit);
      const int64_t head = (first_source + place.row) * part.heads + place.head;
      units[i].Load(part.rows + head * part.layout.features + at.feature, at.partner_stride);
    }
    if (begin == threadIdx.x) {
      for (int i = thread; i < num_angles; i += kThreads) {
        if (i != thread) raw_angle = load_angle(i);
        double angle[1] = {raw_angle.Value(a)};
        rope::ComputeRotations<T>(angle, a.scale, rotations + i);
      }
      if (part.has_slots) {
        write_rows::FindRows(slots, own_slots, first_row, num_rows, a.has_unique_slots, &tile_rows);
        overwritten = tile_rows.overwritten;
        if (layer < 0 || layer >= a.layers) return;
      } else {
        __syncthreads();
      }
    }
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      const Place place = place_of(begin + i * kThreads);
      if (!place.exists) continue;
      int64_t row = first_row + place.row;
      if (part.has_slots) {
        row = tile_rows.slots[place.row];
        if (row < 0 || (overwritten >> place.row & 1u) != 0) continue;
      }
      if (place.unit < part.layout.rotated_units) {
        RotationOfPair of_unit[UnitOfRow::kPairs];
        const RotationOfPair* const from = rotations + place.row * a.pairs.divisor + place.unit * UnitOfRow::kPairs;
        const auto vector = *reinterpret_cast<const Vector<ComputeType<T>, 2 * UnitOfRow::kPairs>*>(from);
        memcpy(of_unit, &vector, sizeof(of_unit));
        units[i].Rotate(of_unit);
      }
      const auto at = UnitOfRow::Locate(part.layout, place.unit);
      const int64_t to = first_dest + row * part.row_stride + place.head * part.head_stride + at.feature;
      if (!part.converts) {
        units[i].Store(static_cast<T*>(part.dest) + to, at.partner_stride);
        continue;
      }
      const float* scale = part.scales;
      if (scale != nullptr) {
        const int64_t scales_of_row = part.has_scale_per_head ? part.heads : 1;
        scale += (part.scales_are_shared ? 0 : batch * scales_of_row) + (part.has_scale_per_head ? place.head : 0);
      }
      StoreConverted<T, kCount>(units[i], part, scale, to, at.partner_stride);
    }
  }
}

// ---- The launch.

// The heads of a pool's rows, as the kernel sees them: runs of neighbours with one scale.
int64_t HeadsOf(const write_rows::Pool& pool) { return std::max(pool.outer, pool.num_scales); }

// Sets how blocks share the rows of a part. `wanted_rows`: of a tile.
template <typename UnitOfRow, typename T>
void SetTiling(const Call& call, const rope::Problem& problem, int64_t wanted_rows, Part<T>* part) {
  constexpr int64_t kMaxUnitsOfTile = int64_t{kMaxUnitsOfThread} * kThreads;
  constexpr int kElementsOfUnit = static_cast<int>(sizeof(UnitOfRow) / sizeof(T));
  part->layout = rope::RowLayout<int64_t>(problem, UnitOfRow::kPairs);
  const int64_t copied = problem.features - 2 * problem.pairs;
  const int64_t units_of_head = part->layout.rotated_units + CeilDivide(copied, kElementsOfUnit);
  part->units_of_head = ShortDivider(static_cast<uint64_t>(units_of_head));
  part->units_of_row = part->heads * units_of_head;
  const int64_t units_of_tile = std::min(part->units_of_row, kMaxUnitsOfTile);
  part->units_of_tile = ShortDivider(static_cast<uint64_t>(units_of_tile));
  const int64_t tiles_of_row = CeilDivide(part->units_of_row, std::max<int64_t>(units_of_tile, 1));
  int64_t rows = 1;
  if (tiles_of_row <= 1) {
    // A tile has at least a unit for each thread, or else threads would be idle.
    rows = std::max(CeilDivide(kThreads, std::max<int64_t>(units_of_tile, 1)), wanted_rows);
    if (!part->has_slots)
      rows = std::min(rows, std::max<int64_t>(1, kMaxUnitsOfTile / std::max<int64_t>(units_of_tile, 1)));
  }
  const int64_t row_bytes_of_table = problem.pairs * static_cast<int64_t>(sizeof(Rotation<ComputeType<T>>));
  if (row_bytes_of_table > 0) rows = std::min(rows, std::max<int64_t>(1, kMaxTableBytes / row_bytes_of_table));
  part->rows_of_tile = static_cast<int>(std::min<int64_t>({rows, call.problem.length, write_rows::kMaxRowsOfTile}));
  const int64_t tiles_of_batch_element = CeilDivide(call.problem.length, part->rows_of_tile) * tiles_of_row;
  part->tiles_of_row = static_cast<uint32_t>(tiles_of_row);  // CUDA rejects grids that do not fit
  part->tiles_of_batch_element = static_cast<uint32_t>(tiles_of_batch_element);
  part->num_tiles = call.problem.batch * tiles_of_batch_element;
}

template <typename T, int kCount, bool kInterleaved>
CudaStatus LaunchUnits(const Call& call, int64_t multiprocessors, cudaStream_t stream) {
  using UnitOfRow = rope::Unit<T, kCount, kInterleaved>;
  const write_rows::Call& write = call.write;
  const rope::Problem& problem = call.problem;
  Arguments<T> a{};
  a.slot_of_row = write.slot_of_row;
  a.layer = write.layer;
  a.slot_of_row_is_shared = write.slot_of_row_is_shared;
  a.layer_is_shared = write.layer_is_shared;
  a.has_unique_slots = write.has_unique_slots;
  a.layers = write.layers;
  a.slots = write.slots;
  a.rows = problem.length;
  a.pairs = ShortDivider(static_cast<uint64_t>(problem.pairs));
  a.frequencies = call.frequencies;
  a.positions = call.positions;
  const auto scale = static_cast<rope::AngleType<T>>(call.scale);
  a.scale = {scale, scale};

  // Larger tiles share more sines and cosines, or lookups of slots, but have to fill the GPU.
  const int64_t rows_of_all = problem.batch * problem.length;
  const int64_t wanted_queries = CeilDivide(rows_of_all, multiprocessors);
  const int64_t wanted_rows = CeilDivide(rows_of_all, kSlotTilesPerMultiprocessor * multiprocessors);
  int64_t blocks = 0, rows_of_table = 0;
  if (call.queries.heads > 0) {
    Part<T>& part = a.parts[kQueryPart];
    part.rows = static_cast<const T*>(call.queries.x);
    part.dest = call.queries.y;
    part.rows_are_shared = call.queries.is_shared;
    part.heads = call.queries.heads;
    part.head_stride = problem.features;
    part.row_stride = part.heads * problem.features;
    part.layer_stride = problem.length * part.row_stride;
    SetTiling<UnitOfRow>(call, problem, wanted_queries, &part);
    rows_of_table = part.rows_of_tile;
    blocks += part.num_tiles;
  }
  for (const write_rows::Pool& pool : write.pools) {
    const bool are_keys = pool.number == kKeys;
    Part<T>& part = a.parts[are_keys ? kKeyPart : kValuePart];
    part.rows = static_cast<const T*>(pool.rows);
    part.dest = pool.dest;
    part.scales = pool.scales;
    part.rows_are_shared = pool.rows_are_shared;
    part.scales_are_shared = pool.scales_are_shared;
    part.has_scale_per_head = pool.num_scales > 1;
    part.has_slots = true;
    part.converts = pool.converts;
    part.to = pool.to;
    rope::Problem of_part = problem;
    part.heads = are_keys ? pool.row_elements() / problem.features : HeadsOf(pool);
    if (!are_keys) {
      of_part.features = pool.row_elements() / part.heads;
      of_part.pairs = of_part.first_rotated = 0;
    }
    part.head_stride = pool.outer > 1 ? write.slots * pool.inner : of_part.features;
    part.row_stride = pool.inner;
    part.layer_stride = write.slots * pool.row_elements();
    SetTiling<UnitOfRow>(call, of_part, wanted_rows, &part);
    if (are_keys) rows_of_table = std::max<int64_t>(rows_of_table, part.rows_of_tile);
    blocks += part.num_tiles;
  }
  if (blocks == 0) return {};
  const int64_t table_bytes = rows_of_table * problem.pairs * static_cast<int64_t>(sizeof(Rotation<ComputeType<T>>));
  const auto table_size = static_cast<size_t>(table_bytes);  // CUDA rejects tables that do not fit
  RotateAndWrite<T, kCount, kInterleaved><<<GridSize(blocks), kThreads, table_size, stream>>>(a);
  return JB_LAUNCH_STATUS(RotateAndWrite);
}

}  // namespace

Strategy Choose(const rope::Problem& problem, int64_t value_features, int64_t element_bytes, bool are_aligned) {
  if (problem.batch == 0 || problem.length == 0) return Strategy::kNothing;
  const int64_t elements = kVectorBytes / element_bytes;
  const bool fits = problem.features % elements == 0 && problem.first_rotated % elements == 0 &&
                    (problem.interleaved ? 2 : 1) * problem.pairs % elements == 0 && value_features % elements == 0;
  return fits && are_aligned ? Strategy::kByVector : Strategy::kByElement;
}

CudaStatus Launch(const Call& call, cudaStream_t stream) {
  JB_RETURN_IF_CUDA_ERROR(write_rows::CopyPools(call.write.copies, stream));
  int multiprocessors = 0;
  JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
  bool are_aligned = AreAligned(kVectorBytes, call.queries.x, call.queries.y);
  int64_t value_features = 0;
  for (const write_rows::Pool& pool : call.write.pools) {
    are_aligned = are_aligned && AreAligned(kVectorBytes, pool.rows, pool.dest);
    if (pool.number != kKeys) value_features = pool.row_elements() / HeadsOf(pool);
  }
  const Strategy strategy = Choose(call.problem, value_features, ElementBytes(call.type), are_aligned);
  if (strategy == Strategy::kNothing) return {};
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = kVectorBytes / sizeof(T);
    const auto launch = strategy == Strategy::kByElement ? LaunchUnits<T, 1, false>
                        : call.problem.interleaved       ? LaunchUnits<T, kVec, true>
                                                         : LaunchUnits<T, kVec, false>;
    status = launch(call, multiprocessors, stream);
  });
  return status;
}

}  // namespace jax_baracuda::rope_write
