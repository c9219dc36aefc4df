// The bulk copy engine: tiles of tensors into swizzled shared memory, and plain runs of bytes in both directions.
#pragma once

#include "ptx.cuh"

namespace megaring {

// What cuTensorMapEncodeTiled fills in on the host.
struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ u64 l2_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 l2_evict_normal() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 l2_evict_last() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One box of a 2-D or 3-D tensor, innermost coordinate first; its bytes complete on `barrier`. Elements outside the
// tensor arrive as zeros and count as delivered.
__device__ __forceinline__ void tma_load(u32 destination, const TensorMap* map, u32 barrier, i32 x, i32 y, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;"
      :
      : "r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_load(u32 destination, const TensorMap* map, u32 barrier, i32 x, i32 y, i32 z,
                                         u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;"
      :
      : "r"(destination), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

// Runs of bytes: both addresses and the count are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(destination), "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* destination, u32 source, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

// Adds a run of floats in shared memory to one in global memory.
__device__ __forceinline__ void bulk_add(float* destination, u32 source, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }

// At most kPending of this thread's store groups still read their shared-memory source.
template <u32 kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kPending) : "memory");
}

// All of this thread's store groups are written, not only read.
__device__ __forceinline__ void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" : : : "memory"); }

// Byte offset of a 16-byte piece in a tile of 128-byte rows as the 128-byte swizzle stores it (tile on 1024 bytes).
__device__ __forceinline__ u32 swizzled_offset(u32 row, u32 piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

}  // namespace megaring
