// A parallel loop over XLA's CPU thread pool.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/core/function_ref.h"

namespace xla::ffi {
class ThreadPool;
}  // namespace xla::ffi

namespace jax_baracuda {

namespace ffi = xla::ffi;

// Runs body(chunk) for every chunk in [0, num_chunks) and returns when all have ended. `body` must not throw. It runs
// with subnormal numbers enabled.
//
// XLA runs handlers on the same pool, so a scheduled task may never find a free thread, and waiting for it could
// deadlock. Therefore the calling thread claims chunks from the shared counter too, and waits only for chunks that
// another thread has already claimed: those are running. A helper that starts late finds no chunk left and touches
// nothing but the shared state it co-owns.
void ParallelFor(ffi::ThreadPool& pool, int64_t num_chunks, FunctionRef<void(int64_t)> body);

// At least 1.
int64_t NumThreadsOf(const ffi::ThreadPool& pool);

// The number of chunks for `total_bytes` of work: enough to keep the pool busy, but each large enough to be worth
// waking a thread (about 20 microseconds).
inline int64_t ChunksFor(const ffi::ThreadPool& pool, int64_t total_bytes) {
  constexpr int64_t kMinBytesPerChunk = 256 * 1024;
  return std::clamp<int64_t>(total_bytes / kMinBytesPerChunk, 1, 4 * NumThreadsOf(pool));
}

// The bounds of chunk `i` when [0, total) is cut into `num_chunks` nearly equal parts.
inline int64_t ChunkBegin(int64_t total, int64_t num_chunks, int64_t i) {
  return total / num_chunks * i + std::min(i, total % num_chunks);
}

// Calls body(batch, begin, end) for ranges that cover [0, count) of each element of a batch. `bytes_of_element` is the
// work of an element.
template <typename Body>
void ForEachRangeOfBatch(ffi::ThreadPool& pool, int64_t batch, int64_t count, int64_t bytes_of_element,
                         const Body& body) {
  const int64_t chunks = std::min(count, ChunksFor(pool, bytes_of_element));
  ParallelFor(pool, batch * chunks, [&](int64_t index) {
    const int64_t chunk = index % chunks;
    body(index / chunks, ChunkBegin(count, chunks, chunk), ChunkBegin(count, chunks, chunk + 1));
  });
}

// Calls body(begin, end) for ranges that cover [0, count). `total_bytes` is the work of all of them.
template <typename Body>
void ForEachRange(ffi::ThreadPool& pool, int64_t count, int64_t total_bytes, const Body& body) {
  ForEachRangeOfBatch(pool, /*batch=*/1, count, total_bytes,
                      [&](int64_t /*batch*/, int64_t begin, int64_t end) { body(begin, end); });
}

}  // namespace jax_baracuda
