// How tiles leave the registers of a warpgroup in the accumulator layout that wgmma.cuh describes: as rounded rows, as
// sums in memory that keep that layout, and as swizzled matrices in shared memory.
#pragma once

#include "ptx.cuh"

namespace megaring {

__device__ __forceinline__ float2 load_shared_f32x2(u32 address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}

// Four 8 x 8 matrices of 16-bit elements; lane 8 * i + r gives the address of row r of matrix i.
__device__ __forceinline__ void store_matrices(u32 address, const u32* packed) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
               : "memory");
}

// Adds four floats in memory of this GPU.
__device__ __forceinline__ void sum_add(float* sums, const float* values) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(sums), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

// Adds four floats in memory that other GPUs add to as well.
__device__ __forceinline__ void sum_add_system(float* sums, const float* values) {
  asm volatile("red.relaxed.sys.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(sums), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

// Takes four sums out of memory, past the first-level cache, and leaves zeros.
__device__ __forceinline__ float4 take_sums(float* sums) {
  const float4 taken = __ldcg(reinterpret_cast<const float4*>(sums));
  __stcg(reinterpret_cast<float4*>(sums), float4{0.0f, 0.0f, 0.0f, 0.0f});
  return taken;
}

// The four lanes of a quad exchange words: lane c ends up with word c of every lane, in lane order.
__device__ __forceinline__ void transpose_quad(u32 (&words)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool high = threadIdx.x & 2;
#pragma unroll
  for (u32 pair = 0; pair < 4; pair += 2) {
    const u32 received = __shfl_xor_sync(0xffffffff, odd ? words[pair] : words[pair + 1], 1);
    (odd ? words[pair] : words[pair + 1]) = received;
  }
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const u32 received = __shfl_xor_sync(0xffffffff, high ? words[i] : words[i + 2], 2);
    (high ? words[i] : words[i + 2]) = received;
  }
}

// Writes 32 columns of two rows, `row` and row + 8 of a tile whose first element is `tile`, where the tile has them.
// `values`: 4 groups of 8 columns, as accumulators.
template <bool kBfloat16>
__device__ __forceinline__ void store_row_pair(u16* tile, i64 stride, i32 row, i32 rows, const float* values) {
  u32 words[2][4];
#pragma unroll
  for (u32 j = 0; j < 4; ++j) {
    words[0][j] = pack_half<kBfloat16>(values[4 * j], values[4 * j + 1]);
    words[1][j] = pack_half<kBfloat16>(values[4 * j + 2], values[4 * j + 3]);
  }
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    transpose_quad(words[half]);
    const i32 at = row + 8 * static_cast<i32>(half);
    if (at < rows) {
      *reinterpret_cast<uint4*>(tile + at * stride + threadIdx.x % 4 * 8) =
          uint4{words[half][0], words[half][1], words[half][2], words[half][3]};
    }
  }
}

// Writes all columns of a thread's two rows.
template <bool kBfloat16, u32 kCount>
__device__ __forceinline__ void store_rows(u16* tile, i64 stride, i32 row, i32 rows, const float (&values)[kCount]) {
#pragma unroll
  for (u32 part = 0; part < kCount / 16; ++part) {
    store_row_pair<kBfloat16>(tile + 32 * part, stride, row, rows, values + 16 * part);
  }
}

}  // namespace megaring
