// What one rank does to another: block 0 pushes 16 KiB with the copy engine and raises a flag; block 1 waits for it,
// loads the bytes with the copy engine, adds them up and answers. `rounds` times, each with other bytes.
#include "mbarrier.cuh"
#include "signal.cuh"
#include "tma.cuh"

namespace megaring {

constexpr u64 kLimit = 2000000000;
constexpr u32 kWords = 4096;

__device__ __forceinline__ bool wait_for(const u64* word, u64 value) {
  const u64 start = nanoseconds();
  while (signal_load_acquire(word) < value) {
    if (nanoseconds() - start > kLimit) return false;
  }
  return true;
}

}  // namespace megaring

// flags: two words at 0. buffer: 16 KiB. sums: [rounds]; stays as it was from the first round on that timed out.
extern "C" __global__ void unit_signal(megaring::u64* flags, char* buffer, megaring::u32* sums, int rounds) {
  using namespace megaring;
  extern __shared__ __align__(1024) char memory[];
  u32* words = reinterpret_cast<u32*>(memory);
  u64* full = reinterpret_cast<u64*>(memory + 4 * kWords);
  __shared__ bool alive;
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(full), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  for (i32 round = 0; round < rounds; ++round) {
    if (blockIdx.x == 0) {
      for (u32 i = threadIdx.x; i < kWords; i += blockDim.x) words[i] = (i + 1) * (round + 1);
      fence_proxy_async_shared();
      __syncthreads();
      if (threadIdx.x == 0) {
        bulk_store(buffer, shared_address(words), 4 * kWords);
        bulk_commit();
        bulk_wait_written();
        fence_proxy_async();
        signal_store_release(flags, round + 1);
        alive = wait_for(flags + 1, round + 1);
      }
    } else {
      if (threadIdx.x == 0) {
        alive = wait_for(flags, round + 1);
        if (alive) {
          fence_proxy_async();
          mbarrier_arrive_expect(shared_address(full), 4 * kWords);
          bulk_load(shared_address(words), buffer, 4 * kWords, shared_address(full));
          mbarrier_wait(shared_address(full), round % 2, kLimit);
          u32 sum = 0;
          for (u32 i = 0; i < kWords; ++i) sum += words[i];
          sums[round] = sum;
          fence_proxy_async();
          signal_store_release(flags + 1, round + 1);
        }
      }
    }
    __syncthreads();
    if (!alive) return;
    __syncthreads();
  }
}
