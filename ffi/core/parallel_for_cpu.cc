#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "ffi/core/parallel_for.h"
#include "ffi/core/subnormals.h"
#include "ffi/core/thread_sanitizer.h"
#include "xla/ffi/api/ffi.h"

namespace jax_baracuda {

void ParallelFor(ffi::ThreadPool& pool, int64_t num_chunks, FunctionRef<void(int64_t)> body) {
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

    // Chunks are independent, so claiming one needs no memory ordering.
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
  const int64_t helpers = std::min(NumThreadsOf(pool), num_chunks) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule(Task(state));
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
    // Continue with fewer helpers. Returning here would end `body` while scheduled helpers may use it.
  }
  LetTasksStart();
  state->Work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_finished.wait(lock, [&] {
    HappensAfter(&state->mutex);
    return state->finished == num_chunks;
  });
}

int64_t NumThreadsOf(const ffi::ThreadPool& pool) { return std::max<int64_t>(1, pool.num_threads()); }

}  // namespace jax_baracuda
