// Words through which ranks talk. Every access has system scope, because the other side can be another GPU.
#pragma once

#include "ptx.cuh"

namespace megaring {

__device__ __forceinline__ u64 signal_load_acquire(const u64* word) {
  u64 value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void signal_store_release(u64* word, u64 value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ u64 signal_load_relaxed(const u64* word) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void signal_store_relaxed(u64* word, u64 value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

// The value that won: `desired` was stored if and only if the returned one equals `expected`.
__device__ __forceinline__ u64 signal_compare_swap(u64* word, u64 expected, u64 desired) {
  u64 previous;
  asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(previous)
               : "l"(word), "l"(expected), "l"(desired)
               : "memory");
  return previous;
}

// Whatever this thread has seen before, its block's other threads' work behind a barrier included, is visible to who
// sees the sum.
__device__ __forceinline__ void signal_add_release(u64* word, u64 value) {
  asm volatile("fence.acq_rel.sys;" : : : "memory");
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

// Words of one GPU.
__device__ __forceinline__ u32 counter_load_acquire(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ u32 counter_add_relaxed(u32* word, u32 value) {
  u32 previous;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(previous) : "l"(word), "r"(value) : "memory");
  return previous;
}

__device__ __forceinline__ u32 counter_add_acq_rel(u32* word, u32 value) {
  u32 previous;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(previous) : "l"(word), "r"(value) : "memory");
  return previous;
}

}  // namespace megaring
