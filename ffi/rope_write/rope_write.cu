// The CUDA kernel of rope_write. One launch rotates queries and keys, and writes keys and values to their pools.
//
// A block takes a tile: some consecutive rows of queries, keys or values, or a part of one long row. Its threads share
// the sines and cosines of these rows. As in write_rows, a block of keys or values looks up which of its rows have the
// slot of a later row. Meanwhile the features of its rows are on their way.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ffi/core/cuda_status.h"
#include "ffi/core/device_attributes.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/launch_bounds.cuh"
#include "ffi/core/strategies.h"
#include "ffi/core/vectors.cuh"
#include "ffi/rope/rope_device.cuh"
#include "ffi/rope_write/rope_write.h"
#include "ffi/write_rows/rows_device.cuh"

namespace jax_baracuda::rope_write {
namespace {

using rope::Rotation;
using write_rows::kThreads;
using write_rows::RowBits;

inline constexpr int kUnitsInFlight = 2;            // per thread
inline constexpr int kBlocksPerMultiprocessor = 4;  // minimum resident blocks, which caps the registers
inline constexpr int64_t kMaxUnitsOfTile = 1024;    // of queries, or of a part of a row
inline constexpr int64_t kMaxTableBytes = 32768;    // of sines and cosines

// Keys and values come first, because their blocks take longer than those of queries.
enum PartNumber { kKeyPart, kValuePart, kQueryPart, kParts };

// Queries, keys or values: [batch, rows, heads, features]. Strides are in elements of a pool; queries have none, because
// their result is laid out as they are.
template <typename T>
struct Part {
  const T* rows;
  void* dest;
  const float* scales;  // the divisors of the numbers; nullptr: 1
  bool rows_are_shared, scales_are_shared, has_scale_per_head;
  bool converts;
  ElementType to;
  int rows_of_tile;
  uint32_t tiles_of_row, tiles_of_batch_element;
  int64_t num_tiles;                         // of the whole batch
  uint32_t units_of_row, units_of_tile_row;  // units_of_tile_row: of the part of a row that is in a tile
  ShortDivider units_of_head, heads_of_row;
  rope::RowLayout<int> layout;  // values have no rotated units
  int64_t heads, row_stride, head_stride, layer_stride;
};

template <typename T>
struct Arguments {
  Part<T> parts[kParts];
  const int32_t *slot_of_row, *layer;
  bool slot_of_row_is_shared, layer_is_shared, has_unique_slots;
  int64_t layers, slots, rows;
  ShortDivider pairs;
  BatchOperand frequencies;
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

// Stands for write_rows::RowsToWrite where all rows are written.
struct AllRows {
  __device__ __forceinline__ RowBits FindOverwritten(write_rows::TileRows* /*tile*/) const {
    __syncthreads();
    return 0;
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

// Writes tile number `block` of a part.
template <int kPart, typename T, int kCount, bool kInterleaved>
__device__ __forceinline__ void WriteTile(const Arguments<T>& a, uint32_t block, write_rows::TileRows* tile_rows,
                                          Rotation<ComputeType<T>>* rotations) {
  using UnitOfRow = rope::Unit<T, kCount, kInterleaved>;
  using RotationOfPair = Rotation<ComputeType<T>>;
  constexpr bool kHasSlots = kPart != kQueryPart, kIsRotated = kPart != kValuePart;
  const Part<T>& part = a.parts[kPart];
  const uint32_t batch = block / part.tiles_of_batch_element;
  const uint32_t tile = block - batch * part.tiles_of_batch_element;
  const uint32_t group = tile / part.tiles_of_row;
  const int64_t first_row = int64_t{group} * part.rows_of_tile;
  const uint32_t first_unit = (tile - group * part.tiles_of_row) * part.units_of_tile_row;
  const uint32_t num_rows = static_cast<uint32_t>(min(int64_t{part.rows_of_tile}, a.rows - first_row));
  // A tile with several rows has whole rows.
  const uint32_t end_unit = min(first_unit + num_rows * part.units_of_tile_row, num_rows * part.units_of_row);
  const int thread = static_cast<int>(threadIdx.x);

  // Issue all loads before the first result is used.
  auto rows_to_write = [&] {
    if constexpr (kHasSlots) {
      const int32_t* const slot_of_row = a.slot_of_row + (a.slot_of_row_is_shared ? 0 : batch * a.rows);
      return write_rows::RowsToWrite({slot_of_row, a.rows, a.slots}, first_row, static_cast<int>(num_rows),
                                     a.has_unique_slots);
    } else {
      return AllRows{};
    }
  }();
  int64_t layer = 0;
  if (kHasSlots && a.layer != nullptr) layer = a.layer[a.layer_is_shared ? 0 : batch];
  const int num_angles = kIsRotated ? static_cast<int>(num_rows * a.pairs.divisor) : 0;
  const auto load_angle = [&](int i) {
    const uint32_t row = a.pairs.Quotient(static_cast<uint32_t>(i));
    RawAngle<T> raw;
    raw.Load(a, batch, first_row + row, static_cast<int>(a.pairs.Remainder(static_cast<uint32_t>(i), row)));
    return raw;
  };
  RawAngle<T> raw_angle{};
  if (thread < num_angles) raw_angle = load_angle(thread);

  // Heads and units are numbered from the first row of the tile.
  const T* const source =
      part.rows + ((part.rows_are_shared ? 0 : batch * a.rows) + first_row) * part.heads * part.layout.features;
  UnitOfRow units[kUnitsInFlight];
  const auto load = [&](uint32_t begin) {
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      const uint32_t number = begin + i * kThreads;
      if (number >= end_unit) continue;
      const uint32_t head = part.units_of_head.Quotient(number);
      const auto at = UnitOfRow::Locate(part.layout, part.units_of_head.Remainder(number, head));
      units[i].Load(source + int64_t{head} * part.layout.features + at.feature, at.partner_stride);
    }
  };
  load(first_unit + threadIdx.x);

  for (int i = thread; i < num_angles; i += kThreads) {
    if (i != thread) raw_angle = load_angle(i);
    double angle[1] = {raw_angle.Value(a)};
    rope::ComputeRotations<T>(angle, a.scale, rotations + i);
  }
  const RowBits overwritten = rows_to_write.FindOverwritten(tile_rows);
  if (kHasSlots && (layer < 0 || layer >= a.layers)) return;

  const int64_t first_dest = kHasSlots ? (batch * a.layers + layer) * part.layer_stride
                                       : (batch * a.rows + first_row) * part.heads * part.layout.features;
  const float* scales = part.scales;
  if (scales != nullptr && !part.scales_are_shared) scales += batch * (part.has_scale_per_head ? part.heads : 1);
#pragma unroll 1
  for (uint32_t begin = first_unit + threadIdx.x; begin < end_unit; begin += kUnitsInFlight * kThreads) {
    if (begin != first_unit + threadIdx.x) load(begin);
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      const uint32_t number = begin + i * kThreads;
      if (number >= end_unit) continue;
      const uint32_t head_of_tile = part.units_of_head.Quotient(number);
      const uint32_t unit = part.units_of_head.Remainder(number, head_of_tile);
      const uint32_t row_of_tile = part.heads_of_row.Quotient(head_of_tile);
      const uint32_t head = part.heads_of_row.Remainder(head_of_tile, row_of_tile);
      const int32_t slot = kHasSlots ? tile_rows->slots[row_of_tile] : 0;
      if (slot < 0 || (overwritten >> row_of_tile & 1u) != 0) continue;
      if (kIsRotated && unit < part.layout.rotated_units) {
        RotationOfPair of_unit[UnitOfRow::kPairs];
        const RotationOfPair* const from = rotations + row_of_tile * a.pairs.divisor + unit * UnitOfRow::kPairs;
        const auto vector = *reinterpret_cast<const Vector<ComputeType<T>, 2 * UnitOfRow::kPairs>*>(from);
        memcpy(of_unit, &vector, sizeof(of_unit));
        units[i].Rotate(of_unit);
      }
      const auto at = UnitOfRow::Locate(part.layout, unit);
      const int64_t of_head =
          kHasSlots ? slot * part.row_stride + head * part.head_stride : int64_t{head_of_tile} * part.layout.features;
      const int64_t to = first_dest + of_head + at.feature;
      if (!kHasSlots || !part.converts) {
        units[i].Store(static_cast<T*>(part.dest) + to, at.partner_stride);
      } else {
        const float* const scale = part.has_scale_per_head ? scales + head : scales;
        StoreConverted<T, kCount>(units[i], part, scale, to, at.partner_stride);
      }
    }
  }
}

template <typename T, int kCount, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, MinBlocks(kThreads, kBlocksPerMultiprocessor))
    RotateAndWrite(const __grid_constant__ Arguments<T> a) {
  extern __shared__ uint4 shared_memory[];
  __shared__ write_rows::TileRows tile_rows;
  auto* const rotations = reinterpret_cast<Rotation<ComputeType<T>>*>(shared_memory);  // of each row of the tile
  // Each part has code of its own, because arguments at fixed places load faster.
  const int64_t key_tiles = a.parts[kKeyPart].num_tiles, slot_tiles = key_tiles + a.parts[kValuePart].num_tiles;
  const int64_t block = blockIdx.x;
  if (block < key_tiles) {
    WriteTile<kKeyPart, T, kCount, kInterleaved>(a, static_cast<uint32_t>(block), &tile_rows, rotations);
  } else if (block < slot_tiles) {
    WriteTile<kValuePart, T, kCount, kInterleaved>(a, static_cast<uint32_t>(block - key_tiles), &tile_rows, rotations);
  } else {
    WriteTile<kQueryPart, T, kCount, kInterleaved>(a, static_cast<uint32_t>(block - slot_tiles), &tile_rows, rotations);
  }
}

// ---- The launch.

// The heads of a pool's rows, as the kernel sees them: runs of neighbours with one scale.
int64_t HeadsOf(const write_rows::Pool& pool) { return std::max(pool.outer, pool.num_scales); }

// Sets how blocks share the rows of a part. `wanted_rows`: of a tile.
template <typename UnitOfRow, typename T>
void SetTiling(const Call& call, const rope::Problem& problem, bool has_slots, int64_t wanted_rows, Part<T>* part) {
  part->layout = rope::RowLayout<int>(problem, UnitOfRow::kPairs);
  const int64_t units_of_head = int64_t{part->layout.rotated_units} + part->layout.copied_units;
  part->units_of_head = ShortDivider(static_cast<uint64_t>(units_of_head));
  part->heads_of_row = ShortDivider(static_cast<uint64_t>(part->heads));
  const int64_t units_of_row = part->heads * units_of_head;
  part->units_of_row = static_cast<uint32_t>(units_of_row);
  const int64_t units_of_tile_row = std::clamp<int64_t>(units_of_row, 1, kMaxUnitsOfTile);
  part->units_of_tile_row = static_cast<uint32_t>(units_of_tile_row);
  const int64_t tiles_of_row = CeilDivide(units_of_row, units_of_tile_row);
  int64_t rows = 1;
  if (tiles_of_row <= 1) {
    // A tile has at least a unit for each thread, or else threads would be idle.
    rows = std::max(CeilDivide(kThreads, units_of_tile_row), wanted_rows);
    if (!has_slots) rows = std::min(rows, kMaxUnitsOfTile / units_of_tile_row);
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
  const int64_t wanted_rows = CeilDivide(rows_of_all, kBlocksPerMultiprocessor * multiprocessors);
  int64_t blocks = 0, rows_of_table = 0;
  if (call.queries.heads > 0) {
    Part<T>& part = a.parts[kQueryPart];
    part.rows = static_cast<const T*>(call.queries.x.data);
    part.dest = call.queries.y;
    part.rows_are_shared = call.queries.x.is_shared;
    part.heads = call.queries.heads;
    SetTiling<UnitOfRow>(call, problem, /*has_slots=*/false, wanted_queries, &part);
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
    SetTiling<UnitOfRow>(call, of_part, /*has_slots=*/true, wanted_rows, &part);
    if (are_keys) rows_of_table = std::max<int64_t>(rows_of_table, part.rows_of_tile);
    blocks += part.num_tiles;
  }
  if (blocks == 0) return {};
  const int64_t table_bytes = rows_of_table * problem.pairs * static_cast<int64_t>(sizeof(Rotation<ComputeType<T>>));
  const auto table_size = static_cast<size_t>(table_bytes);  // CUDA rejects tables that do not fit
  RotateAndWrite<T, kCount, kInterleaved><<<GridSize(blocks), kThreads, table_size, stream>>>(a);
  return JB_LAUNCH_STATUS(RotateAndWrite);
}

enum class Strategy {
  kByVector,
  kByElement,  // for rows that vectors do not fit
};

constexpr const char* kStrategyNames[] = {"by_vector", "by_element"};

// Neighbouring features of values; 0 if no values are written.
int64_t ValueFeatures(const Call& call) {
  int64_t features = 0;
  for (const write_rows::Pool& pool : call.write.pools) {
    if (pool.number == kValues) features = pool.row_elements() / HeadsOf(pool);
  }
  return features;
}

Strategy Choose(const Call& call) {
  const int64_t elements = kVectorBytes / ElementBytes(call.type);
  bool are_aligned = AreAligned(kVectorBytes, call.queries.x.data, call.queries.y);
  for (const write_rows::Pool& pool : call.write.pools) {
    are_aligned = are_aligned && AreAligned(kVectorBytes, pool.rows, pool.dest);
  }
  const bool has_vectors = are_aligned && call.problem.HasVectors(elements) && ValueFeatures(call) % elements == 0;
  return has_vectors ? Strategy::kByVector : Strategy::kByElement;
}

}  // namespace

std::vector<const char*> Call::Strategies() { return {JB_NAMES(kStrategyNames)}; }

Plan Call::MakePlan() const { return {NameOf(kStrategyNames, Choose(*this))}; }

CudaStatus Call::Run(cudaStream_t stream) const {
  for (const Copy& copy : write.copies) JB_RETURN_IF_CUDA_ERROR(LaunchCopy(copy, stream));
  if (problem.batch == 0 || problem.length == 0) return {};
  int multiprocessors = 0;
  JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
  // Indices inside a head have 32 bits.
  if (std::max(problem.features, ValueFeatures(*this)) > std::numeric_limits<int>::max()) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  const Strategy strategy = Choose(*this);
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = kVectorBytes / sizeof(T);
    const auto launch = strategy == Strategy::kByElement ? LaunchUnits<T, 1, false>
                        : problem.interleaved            ? LaunchUnits<T, kVec, true>
                                                         : LaunchUnits<T, kVec, false>;
    return launch(*this, multiprocessors, stream);
  });
}

}  // namespace jax_baracuda::rope_write
