// Online softmax of one warpgroup's 64 rows, in the accumulator layout that wgmma.cuh describes: a thread holds two
// rows (r and r + 8), and the four lanes of a quad share them. Scores are unscaled; `scale` is softmax_scale * log2(e),
// so that one fused multiply-add and one exp2 make a probability.
#pragma once

#include "ptx.cuh"

namespace megaring {

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xff800000u);

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffff, value, 1);
  return value + __shfl_xor_sync(0xffffffff, value, 2);
}

// Running maximum (of scaled scores) and this thread's part of the running sum, of its two rows.
struct SoftmaxState {
  float maximum[2];
  float sum[2];
};

// Columns at or past `limit` (per row) become -inf. `column` is that of the thread's first score.
template <u32 kCount>
__device__ __forceinline__ void mask_columns(float (&scores)[kCount], u32 column, u32 limit_0, u32 limit_8) {
#pragma unroll
  for (u32 j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (u32 e = 0; e < 2; ++e) {
      if (column + 8 * j + e >= limit_0) scores[4 * j + e] = kMinusInfinity;
      if (column + 8 * j + e >= limit_8) scores[4 * j + 2 + e] = kMinusInfinity;
    }
  }
}

// Turns scores into probabilities in place and brings the state up to date. Returns whether earlier partial outputs
// have to be multiplied by `rescale`, the same for all lanes of a warp. Every row has at least one finite score, which
// the plan sees to: its first tile holds the query's own key. kFirst: the state is taken as empty, nothing to rescale.
// `slack`: powers of two by which scores may outgrow the running maximum before it follows them. Probabilities can then
// reach 2^slack, which costs no precision while the types hold it, and most tiles leave earlier outputs as they are.
template <bool kFirst, u32 kCount>
__device__ __forceinline__ bool softmax_step(float (&scores)[kCount], SoftmaxState& state, float (&rescale)[2],
                                             float scale, float slack) {
  float maximum[2];
#pragma unroll
  for (u32 row = 0; row < 2; ++row) {
    float top = scores[2 * row];
#pragma unroll
    for (u32 j = 0; j < kCount / 4; ++j) {
      top = fmaxf(top, fmaxf(scores[4 * j + 2 * row], scores[4 * j + 2 * row + 1]));
    }
    maximum[row] = quad_max(top) * scale;
  }
  bool outgrown = false;
  if constexpr (!kFirst) {
    outgrown = __any_sync(0xffffffff,
                          maximum[0] > state.maximum[0] + slack || maximum[1] > state.maximum[1] + slack);
  }
  if (kFirst || outgrown) {
#pragma unroll
    for (u32 row = 0; row < 2; ++row) {
      if constexpr (!kFirst) {
        maximum[row] = fmaxf(maximum[row], state.maximum[row]);
        rescale[row] = exp2_fast(state.maximum[row] - maximum[row]);
        state.sum[row] *= rescale[row];
      }
      state.maximum[row] = maximum[row];
    }
  }
#pragma unroll
  for (u32 row = 0; row < 2; ++row) {
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (u32 e = 0; e < 2; ++e) {
        float& score = scores[4 * j + 2 * row + e];
        score = exp2_fast(__fmaf_rn(score, scale, -state.maximum[row]));
        sum += score;
      }
    }
    state.sum[row] = kFirst ? sum : state.sum[row] + sum;
  }
  return outgrown;
}

template <u32 kCount>
__device__ __forceinline__ void scale_rows(float (&values)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (u32 j = 0; j < kCount / 4; ++j) {
    values[4 * j] *= factor[0];
    values[4 * j + 1] *= factor[0];
    values[4 * j + 2] *= factor[1];
    values[4 * j + 3] *= factor[1];
  }
}

// Probabilities rounded and packed as the A operand of the next product: 16 columns per four words.
template <bool kBfloat16, u32 kCount>
__device__ __forceinline__ void pack_probabilities(const float (&scores)[kCount], u32 (&packed)[kCount / 2]) {
#pragma unroll
  for (u32 i = 0; i < kCount / 2; ++i) packed[i] = pack_half<kBfloat16>(scores[2 * i], scores[2 * i + 1]);
}

// Natural log of the sum of exponentials of a row, from its scaled maximum and its whole sum.
__device__ __forceinline__ float log_sum_exp(float maximum, float sum) { return (maximum + log2_fast(sum)) * kLn2; }

}  // namespace megaring
