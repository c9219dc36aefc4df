// Online softmax over `tiles` blocks of 128 scores for 64 rows: mean of the blocks' probabilities' columns as the value
// matrix would weigh them (an identity per block), and the LSE.
#include "softmax.cuh"

// scores: [tiles, 64, 128]. limit: columns of the last tile that count, per row r min(limit, r + 1) if diagonal.
// output: [64, 128], the sum over tiles of normalised probabilities. lse: [64].
extern "C" __global__ void __launch_bounds__(128, 1)
    unit_softmax(const float* scores, float* output, float* lse, int tiles, int limit, int diagonal, float scale) {
  using namespace megaring;
  const u32 row = threadIdx.x / kWarp * 16 + threadIdx.x % kWarp / 4;
  const u32 column = threadIdx.x % 4 * 2;
  SoftmaxState state;
  float sums[64];
  for (i32 tile = 0; tile < tiles; ++tile) {
    float block[64];
    float rescale[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < 64; ++i) {
      block[i] = scores[(tile * 64 + row + i % 4 / 2 * 8) * 128 + i / 4 * 8 + column + i % 2];
    }
    if (tile == 0) {
      const u32 columns = limit;
      mask_columns(block, column, diagonal ? min(columns, row + 1) : columns, diagonal ? min(columns, row + 9) : columns);
      softmax_step<true>(block, state, rescale, scale, MEGARING_SLACK);
#pragma unroll
      for (u32 i = 0; i < 64; ++i) sums[i] = block[i];
    } else {
      if (softmax_step<false>(block, state, rescale, scale, MEGARING_SLACK)) scale_rows(sums, rescale);
#pragma unroll
      for (u32 i = 0; i < 64; ++i) sums[i] += block[i];
    }
  }
  float inverse[2];
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const float sum = quad_sum(state.sum[i]);
    inverse[i] = 1.0f / sum;
    if (threadIdx.x % 4 == 0) lse[row + 8 * i] = log_sum_exp(state.maximum[i], sum);
  }
  scale_rows(sums, inverse);
#pragma unroll
  for (u32 i = 0; i < 64; ++i) output[(row + i % 4 / 2 * 8) * 128 + i / 4 * 8 + column + i % 2] = sums[i];
}
