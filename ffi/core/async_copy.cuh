// Asynchronous copies to shared memory. They overlap with computation, and keep far more bytes in flight than loads
// into registers could.
#pragma once

#include <cstdint>

namespace jax_baracuda {

// Copies kBytes; writes zeros if the condition is false.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(void* shared, const void* global, bool condition) {
  if constexpr (kBytes == 2) {  // too narrow for the instruction
    *static_cast<uint16_t*>(shared) = condition ? *static_cast<const uint16_t*>(global) : uint16_t{0};
  } else {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const int bytes = condition ? kBytes : 0;
    if constexpr (kBytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global), "n"(kBytes), "r"(bytes)
                   : "memory");
    }
  }
}

// Ends a group of copies.
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the newest kGroups groups of this thread are pending.
template <int kGroups>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace jax_baracuda
