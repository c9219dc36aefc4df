// Matrix products of one warpgroup: D[64, N] += A[64, 16] x B[16, N], accumulators in registers.
//
// Where a thread's values lie (lane = thread % 32, warp = thread / 32 % 4, row = 16 * warp + lane / 4, and
// column = 8 * j + 2 * (lane % 4)): d[4j], d[4j + 1] are D[row, column], D[row, column + 1], and d[4j + 2], d[4j + 3]
// the same of row + 8. A from registers takes the same layout packed in pairs, so the D of one product becomes the A of
// the next without leaving its thread: a[0], a[1] are columns 0 to 7 of row and row + 8, a[2], a[3] columns 8 to 15.
#pragma once

#include "ptx.cuh"

namespace megaring {

// A swizzled tile as the tensor cores address it: 128-byte rows, 128-byte swizzle, start on 1024 bytes (plus a step
// within the first 128 bytes). `stride_bytes` lies between groups of 8 rows; `leading_bytes` between blocks of 64
// elements along M or N when those are the contiguous ones, and has no meaning when K is.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
  constexpr u64 kSwizzle128 = 1ull << 62;
  return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
         static_cast<u64>(stride_bytes >> 4) << 32 | kSwizzle128;
}

__device__ __forceinline__ u64 descriptor_advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Registers written since the last product are ready to be read by the next ones.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Until at most kPending committed groups of products still run. `finished` are accumulators of those that no longer do:
// the empty statements keep the compiler from moving their use before the wait, which it does not know to be one.
template <u32 kPending, u32 kCount>
__device__ __forceinline__ void wgmma_wait(float (&finished)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(finished[i]) : : "memory");
}

#define MEGARING_D_N64                                                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                                            \
  " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define MEGARING_OPERANDS_N64                                                                                         \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                     \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),               \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),             \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define MEGARING_D_N128                                                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                                            \
  " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"                                  \
  " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"                                  \
  " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define MEGARING_OPERANDS_N128                                                                                        \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                     \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),               \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),             \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),             \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),             \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),             \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),             \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

// A and B in shared memory, K contiguous in both. Without `accumulate` D starts at zero.
#define MEGARING_WGMMA_SS_N128(TYPE)                                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                           \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " MEGARING_D_N128                       \
               ", %64, %65, p, 1, 1, 0, 0;\n}"                                                                        \
               : MEGARING_OPERANDS_N128                                                                               \
               : "l"(a), "l"(b), "r"(accumulate))

template <bool kBfloat16>
__device__ __forceinline__ void wgmma_ss(float (&d)[64], u64 a, u64 b, u32 accumulate) {
  if constexpr (kBfloat16) {
    MEGARING_WGMMA_SS_N128("bf16");
  } else {
    MEGARING_WGMMA_SS_N128("f16");
  }
}

// A in registers, B in shared memory with N contiguous.
#define MEGARING_WGMMA_RS_N128(TYPE)                                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " MEGARING_D_N128                       \
               ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                             \
               : MEGARING_OPERANDS_N128                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <bool kBfloat16>
__device__ __forceinline__ void wgmma_rs(float (&d)[64], const u32* a, u64 b) {
  if constexpr (kBfloat16) {
    MEGARING_WGMMA_RS_N128("bf16");
  } else {
    MEGARING_WGMMA_RS_N128("f16");
  }
}

// A in registers, B in shared memory with N contiguous.
#define MEGARING_WGMMA_RS_N64(TYPE)                                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " MEGARING_D_N64                         \
               ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                                             \
               : MEGARING_OPERANDS_N64                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <bool kBfloat16>
__device__ __forceinline__ void wgmma_rs(float (&d)[32], const u32* a, u64 b) {
  if constexpr (kBfloat16) {
    MEGARING_WGMMA_RS_N64("bf16");
  } else {
    MEGARING_WGMMA_RS_N64("f16");
  }
}

// A and B in shared memory, K contiguous in both. Without `accumulate` D starts at zero.
#define MEGARING_WGMMA_SS_N64(TYPE, TRANSPOSED)                                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                           \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " MEGARING_D_N64                         \
               ", %32, %33, p, 1, 1, " TRANSPOSED ", " TRANSPOSED ";\n}"                                              \
               : MEGARING_OPERANDS_N64                                                                                \
               : "l"(a), "l"(b), "r"(accumulate))

template <bool kBfloat16>
__device__ __forceinline__ void wgmma_ss(float (&d)[32], u64 a, u64 b, u32 accumulate) {
  if constexpr (kBfloat16) {
    MEGARING_WGMMA_SS_N64("bf16", "0");
  } else {
    MEGARING_WGMMA_SS_N64("f16", "0");
  }
}

// A with M and B with N contiguous, both in shared memory.
template <bool kBfloat16>
__device__ __forceinline__ void wgmma_ss_transposed(float (&d)[32], u64 a, u64 b, u32 accumulate) {
  if constexpr (kBfloat16) {
    MEGARING_WGMMA_SS_N64("bf16", "1");
  } else {
    MEGARING_WGMMA_SS_N64("f16", "1");
  }
}

#define MEGARING_WGMMA_SS_N32(TYPE)                                                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                                           \
               "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                                            \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"                              \
               ", %16, %17, p, 1, 1, 1, 1;\n}"                                                                        \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),      \
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),             \
                 "+f"(d[15])                                                                                          \
               : "l"(a), "l"(b), "r"(accumulate))

template <bool kBfloat16>
__device__ __forceinline__ void wgmma_ss_transposed(float (&d)[16], u64 a, u64 b, u32 accumulate) {
  if constexpr (kBfloat16) {
    MEGARING_WGMMA_SS_N32("bf16");
  } else {
    MEGARING_WGMMA_SS_N32("f16");
  }
}

}  // namespace megaring
