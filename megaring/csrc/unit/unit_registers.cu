// Register quotas as the forward kernel deals them: two warpgroups hold more values than they were launched with.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) unit_registers(float* output, const float* input, int rounds) {
  using namespace megaring;
  constexpr u32 kValues = 176;
  if (threadIdx.x < kWarpgroup) {
    lower_registers<72>();
    output[threadIdx.x] = input[threadIdx.x];
  } else {
    raise_registers<216>();
    float values[kValues];
#pragma unroll
    for (u32 i = 0; i < kValues; ++i) values[i] = input[threadIdx.x] + i;
#pragma unroll 1
    for (i32 round = 0; round < rounds; ++round) {
      const float first = values[0];
#pragma unroll
      for (u32 i = 0; i + 1 < kValues; ++i) values[i] = values[i + 1];
      values[kValues - 1] = first;
    }
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kValues; ++i) sum += values[i] * i;
    output[threadIdx.x] = sum;
  }
}
