// Single PTX instructions that need no state of their own: names for what the other layers and the kernels share.
#pragma once

namespace megaring {

using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kWarp = 32;
constexpr u32 kWarpgroup = 128;

// Address of a shared-memory object in the shared window: what mbarriers, the copy engine and wgmma descriptors take.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Ends the launch with an error, by a store to an address that no process has. Not by `trap`: with that in a loop, ptxas
// (13.0) gives up on the roles' own register quotas and compiles the whole kernel for those it is launched with.
__device__ __forceinline__ void fault() { asm volatile("st.global.b32 [%0], 0;" : : "l"(0ull) : "memory"); }

// One lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n}"
      : "=r"(elected)
      :
      : "memory");
  return elected != 0;
}

// Register quota of the calling warpgroup; every one of its warps has to execute it.
template <u32 kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

template <u32 kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// Hardware barriers 1 to 15 (0 is __syncthreads). `threads` counts those that sync and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary accesses with those of the copy engine and the tensor cores: all of memory, or shared.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" : : : "memory"); }

__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// 2^x and log2(x) of the special function unit.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest and packed, `low` in bits 0 to 15.
template <bool kBfloat16>
__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 packed;
  if constexpr (kBfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

__device__ __forceinline__ void store_shared(u32 address, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" : : "r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ u32 load_shared_u32(u32 address) {
  u32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_shared_u32x4(u32 address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

}  // namespace megaring
