// One swizzled box of a tensor, read back through swizzled_offset: rows first to first + 127, 64 columns.
#include "mbarrier.cuh"
#include "tma.cuh"

namespace megaring {

constexpr u64 kLimit = 2000000000;

struct alignas(1024) Tile {
  char bytes[128 * 128];
  u64 full;
};

__device__ __forceinline__ void prepare(Tile& tile) {
  if (threadIdx.x == 0) {
    if (shared_address(&tile) % 1024 != 0) fault();
    mbarrier_init(shared_address(&tile.full), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
}

__device__ __forceinline__ void read_back(Tile& tile, uint4* output) {
  mbarrier_wait(shared_address(&tile.full), 0, kLimit);
  for (u32 i = threadIdx.x; i < 128 * 8; i += blockDim.x) {
    output[i] = load_shared_u32x4(shared_address(tile.bytes) + swizzled_offset(i / 8, i % 8));
  }
}

}  // namespace megaring

// map: [rows, columns]. output: [128, 64] of 2-byte elements.
extern "C" __global__ void unit_tma_2d(const __grid_constant__ megaring::TensorMap map, uint4* output, int column,
                                       int row) {
  using namespace megaring;
  extern __shared__ __align__(1024) char memory[];
  Tile& tile = *reinterpret_cast<Tile*>(memory);
  prepare(tile);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(shared_address(&tile.full), sizeof(tile.bytes));
    tma_load(shared_address(tile.bytes), &map, shared_address(&tile.full), column, row, l2_evict_first());
  }
  read_back(tile, output);
}

// map: [rows, heads, columns]. output: [128, 64].
extern "C" __global__ void unit_tma_3d(const __grid_constant__ megaring::TensorMap map, uint4* output, int column,
                                       int head, int row) {
  using namespace megaring;
  extern __shared__ __align__(1024) char memory[];
  Tile& tile = *reinterpret_cast<Tile*>(memory);
  prepare(tile);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(shared_address(&tile.full), sizeof(tile.bytes));
    tma_load(shared_address(tile.bytes), &map, shared_address(&tile.full), column, head, row, l2_evict_last());
  }
  read_back(tile, output);
}
