// A parallel loop over XLA's CPU thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "ffi/core/function_ref.h"
#include "ffi/core/subnormals.h"
#include "ffi/core/thread_sanitizer.h"
#include "xla/ffi/api/ffi.h"

namespace jax_baracuda {

// Runs body(chunk) for every chunk in [0, num_chunks) and returns when all have ended. `body` must not throw, and
// computes with subnormal numbers.
//
// XLA runs handlers on the same pool, so waiting for scheduled tasks could wait for a task that no thread is free to
// run. Therefore the calling thread claims chunks from the shared counter too, and waits only for chunks that another
// thread has already claimed: those are running. A helper that starts late finds no chunk left and touches nothing but
// the shared state it co-owns.
//
// Not inlined: that would take compilers most of their time for a call to which the loop in `body` is all that counts.
__attribute__((noinline)) inline void ParallelFor(xla::ffi::ThreadPool& pool, int64_t num_chunks,
                                                  FunctionRef<void(int64_t)> body) {
  if (num_chunks <= 1) {
    const ScopedSubnormals subnormals;
    if (num_chunks == 1) body(int64_t{0});
    return;
  }
  struct State {
    State(int64_t chunks, FunctionRef<void(int64_t)> loop_body) : num_chunks(chunks), body(loop_body) {}
    const int64_t num_chunks;
    const FunctionRef<void(int64_t)> body;  // valid while any chunk is unfinished
    std::atomic<int64_t> next{0};
    int64_t finished = 0;  // guarded by mutex
    std::mutex mutex;
    std::condition_variable all_finished;

    // Chunks are independent: claiming one orders nothing.
    int64_t Claim() { return next.fetch_add(1, std::memory_order_relaxed); }

    void Work() {
      const ScopedSubnormals subnormals;
      int64_t done = 0;
      for (int64_t chunk = Claim(); chunk < num_chunks; chunk = Claim()) {
        body(chunk);
        ++done;
      }
      if (done == 0) return;
      std::lock_guard<std::mutex> lock(mutex);
      HappensAfter(&mutex);
      finished += done;
      HappensBefore(&mutex);
      if (finished == num_chunks) all_finished.notify_all();
    }
  };
  // The pool copies a task and runs the copy.
  struct Task {
    std::shared_ptr<State> state;

    explicit Task(std::shared_ptr<State> loop) : state(std::move(loop)) {}
    Task(const Task& other) : state(other.state) { HappensBefore(state.get()); }
    void operator()() const {
      HappensAfter(state.get());
      state->Work();
    }
  };
  auto state = std::make_shared<State>(num_chunks, body);
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), num_chunks) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule(Task(state));
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
    // Those that are scheduled need `body`, so this function must not end before them. Fewer helpers will do.
  }
  LetTasksStart();
  state->Work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_finished.wait(lock, [&] {
    HappensAfter(&state->mutex);
    return state->finished == num_chunks;
  });
}

// How many chunks to cut `total_bytes` of work into: enough to keep the pool busy, none so small that waking a thread
// (some 20 microseconds) costs more than the work.
inline int64_t ChunksFor(const xla::ffi::ThreadPool& pool, int64_t total_bytes) {
  constexpr int64_t kMinBytesPerChunk = 256 * 1024;
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  return std::clamp<int64_t>(total_bytes / kMinBytesPerChunk, 1, 4 * threads);
}

// The bounds of chunk `i` when [0, total) is cut into `num_chunks` nearly equal parts.
inline int64_t ChunkBegin(int64_t total, int64_t num_chunks, int64_t i) {
  return total / num_chunks * i + std::min(i, total % num_chunks);
}

// Calls body(begin, end) for ranges that make up [0, count), which takes `total_bytes` of work.
template <typename Body>
void ForEachRange(xla::ffi::ThreadPool& pool, int64_t count, int64_t total_bytes, const Body& body) {
  const int64_t chunks = std::min(count, ChunksFor(pool, total_bytes));
  ParallelFor(pool, chunks,
              [&](int64_t chunk) { body(ChunkBegin(count, chunks, chunk), ChunkBegin(count, chunks, chunk + 1)); });
}

}  // namespace jax_baracuda
