// Pauses at random places, in the variant that tests compile with MEGARING_DELAYS: they shift the roles of a kernel
// against each other, so that an order which only usually holds shows itself.
#pragma once

#include "ptx.cuh"

namespace megaring {

// Every eighth call, about, sleeps for up to 4 microseconds. Nothing in the ordinary kernels.
__device__ __forceinline__ void delay_randomly() {
#ifdef MEGARING_DELAYS
  u32 bits = static_cast<u32>(nanoseconds()) * 2654435761u ^ (blockIdx.x * 40503u + threadIdx.x / kWarp * 30011u);
  bits = (bits ^ bits >> 15) * 2246822519u;
  bits ^= bits >> 13;
  if (bits % 8 == 0) __nanosleep(bits >> 20);
#endif
}

}  // namespace megaring
