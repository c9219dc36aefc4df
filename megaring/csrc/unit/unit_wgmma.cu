// The two matrix products of attention, one warpgroup each, on tiles that TMA has laid out: 128 rows of MEGARING_HEAD_DIM.
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace megaring {

constexpr u64 kLimit = 2000000000;
constexpr u32 kHeadDim = MEGARING_HEAD_DIM;
constexpr bool kBfloat16 = MEGARING_BFLOAT16;
constexpr u32 kHalfBytes = 128 * 128;
constexpr u32 kTileBytes = kHeadDim / 64 * kHalfBytes;

// Loads one tile per map (maps are of [rows, head dim]) into shared memory at consecutive places.
__device__ __forceinline__ u32 load_tiles(char* memory, const TensorMap* first, const TensorMap* second) {
  u64* full = reinterpret_cast<u64*>(memory + 2 * kTileBytes);
  if (threadIdx.x == 0) {
    if (shared_address(memory) % 1024 != 0) fault();
    mbarrier_init(shared_address(full), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(shared_address(full), (second == nullptr ? 1 : 2) * kTileBytes);
    for (u32 half = 0; half < kHeadDim / 64; ++half) {
      const u32 at = shared_address(memory) + half * kHalfBytes;
      tma_load(at, first, shared_address(full), half * 64, 0, l2_evict_first());
      if (second != nullptr) tma_load(at + kTileBytes, second, shared_address(full), half * 64, 0, l2_evict_first());
    }
  }
  __syncthreads();
  mbarrier_wait(shared_address(full), 0, kLimit);
  return shared_address(memory);
}

template <u32 kColumns>
__device__ __forceinline__ void write(float* output, const float (&d)[kColumns / 2], u32 group) {
  const u32 row = group * 64 + threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4;
  const u32 column = threadIdx.x % 4 * 2;
  for (u32 j = 0; j < kColumns / 8; ++j) {
    for (u32 i = 0; i < 4; ++i) {
      output[(row + i / 2 * 8) * kColumns + 8 * j + column + i % 2] = d[4 * j + i];
    }
  }
}

}  // namespace megaring

// output[128, 128] = query x key^T; two warpgroups, 64 query rows each.
extern "C" __global__ void __launch_bounds__(256, 1)
    unit_wgmma_ss(const __grid_constant__ megaring::TensorMap query, const __grid_constant__ megaring::TensorMap key,
                  float* output) {
  using namespace megaring;
  extern __shared__ __align__(1024) char memory[];
  const u32 at = load_tiles(memory, &query, &key);
  const u32 group = threadIdx.x / kWarpgroup;
  const u64 a = matrix_descriptor(at + group * 64 * 128, 16, 1024);
  const u64 b = matrix_descriptor(at + kTileBytes, 16, 1024);
  float d[64];
#pragma unroll
  for (u32 i = 0; i < 64; ++i) d[i] = 1e30f;  // the first product must overwrite it
  wgmma_fence();
#pragma unroll
  for (u32 step = 0; step < kHeadDim / 16; ++step) {
    const u32 offset = step / 4 * kHalfBytes + step % 4 * 32;
    wgmma_ss<kBfloat16>(d, descriptor_advance(a, offset), descriptor_advance(b, offset), step != 0);
  }
  wgmma_commit();
  wgmma_wait<0>(d);
  write<128>(output, d, group);
}

// output[64, head dim] = probabilities[64, 128] x value[128, head dim], the former from registers.
extern "C" __global__ void __launch_bounds__(128, 1)
    unit_wgmma_rs(const __grid_constant__ megaring::TensorMap value, const float* probabilities, float* output) {
  using namespace megaring;
  extern __shared__ __align__(1024) char memory[];
  const u32 at = load_tiles(memory, &value, nullptr);
  const u32 row = threadIdx.x / kWarp * 16 + threadIdx.x % kWarp / 4;
  const u32 column = threadIdx.x % 4 * 2;
  u32 a[32];
#pragma unroll
  for (u32 i = 0; i < 32; ++i) {
    const float* pair = probabilities + (row + i % 2 * 8) * 128 + i / 2 * 8 + column;
    a[i] = pack_half<kBfloat16>(pair[0], pair[1]);
  }
  float d[kHeadDim / 2];
#pragma unroll
  for (u32 i = 0; i < kHeadDim / 2; ++i) d[i] = 0.0f;
  const u64 b = matrix_descriptor(at, kHalfBytes, 1024);
  wgmma_fence();
#pragma unroll
  for (u32 step = 0; step < 8; ++step) wgmma_rs<kBfloat16>(d, a + 4 * step, descriptor_advance(b, step * 2048));
  wgmma_commit();
  wgmma_wait<0>(d);
  write<kHeadDim>(output, d, 0);
}
