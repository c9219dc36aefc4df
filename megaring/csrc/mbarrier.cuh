// Shared-memory barriers with a phase: how the copy engine tells consumers that a stage is full, and they that it is free.
#pragma once

#include "ptx.cuh"

namespace megaring {

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; the initialising thread calls it before the block's barrier.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  fence_proxy_async_shared();
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// Arrives and lets the phase also wait for `bytes` that the copy engine is going to deliver.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits until the phase with this parity has completed. The partners are warps of the same block, each of which has a
// bound of its own on whatever it waits for outside, so running past `limit_ns` means a broken pipeline: a fault.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity, u64 limit_ns) {
  if (mbarrier_try_wait(barrier, parity)) return;
  const u64 start = nanoseconds();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (nanoseconds() - start > limit_ns) fault();
  }
}

// Position in a ring of kStages stages. A fresh ring waits for parity 0 as the reader of full stages and for parity 1
// as the writer into empty ones (a fresh mbarrier counts as having completed the phase before its first).
template <u32 kStages>
struct Ring {
  u32 stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace megaring
