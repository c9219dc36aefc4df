// What the consumers of a backward call do before and after its tasks: statistics of the query rows, and conversion of
// the fp32 sums.
#pragma once

#include "backward_layout.cuh"
#include "fragments.cuh"
#include "signal.cuh"
#include "softmax.cuh"
#include "watchdog.cuh"

namespace megaring {

constexpr u32 kConsumerBarrier = 2;  // all consumers of the block
constexpr float kLog2e = 1.4426950408889634f;

// All CTAs of the rank: what any of them wrote before, every one sees after. `phase` counts from 1 within a call.
__device__ __forceinline__ void meet(const BackwardArguments& arguments, const RankArguments& rank, u32 phase) {
  named_barrier_sync(kConsumerBarrier, kConsumers * kWarpgroup);
  if (threadIdx.x == kWarpgroup) {
    __threadfence();
    fence_proxy_async();
    u32* arrivals = &rank.control->arrivals;
    counter_add_acq_rel(arrivals, 1);
    const u64 start = nanoseconds();
    while (counter_load_acquire(arrivals) < phase * arguments.base.ctas_per_rank) {
      if (nanoseconds() - start > pipeline_limit(arguments.base)) fault();
    }
    fence_proxy_async();
  }
  named_barrier_sync(kConsumerBarrier, kConsumers * kWarpgroup);
}

template <bool kBfloat16>
__device__ __forceinline__ float dot_halves(u32 a, u32 b) {
  float low_a, high_a, low_b, high_b;
  if constexpr (kBfloat16) {
    low_a = __uint_as_float(a << 16), high_a = __uint_as_float(a & 0xffff0000u);
    low_b = __uint_as_float(b << 16), high_b = __uint_as_float(b & 0xffff0000u);
  } else {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(low_a), "=f"(high_a)
        : "r"(a));
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(low_b), "=f"(high_b)
        : "r"(b));
  }
  return __fmaf_rn(low_a, low_b, high_a * high_b);
}

// Per query row and head: LSE * log2(e), and delta = rowsum(output * its gradient). Rows that a tile lacks get +inf and
// 0, which makes their probabilities and slopes 0. A warp takes a tile and head at a time.
__device__ __forceinline__ void prepare_statistics(const BackwardArguments& arguments, const RankArguments& rank,
                                                   const BackwardRank& more, i32 cta) {
  constexpr u32 kLanes = kHeadDim / 8;  // lanes that share a row, 16 bytes each
  constexpr u32 kRows = kWarp / kLanes;
  const u32 lane = threadIdx.x % kWarp;
  const u32 warp = threadIdx.x / kWarp - kWarpgroup / kWarp;
  const i64 heads = arguments.base.query_heads;
  const u32 items = more.num_query_tiles * arguments.base.query_heads;
  const u32 warps = arguments.base.ctas_per_rank * kConsumers * kWarpgroup / kWarp;
#pragma unroll 1
  for (u32 item = cta * kConsumers * kWarpgroup / kWarp + warp; item < items; item += warps) {
    const u32 head = item % arguments.base.query_heads;
    const u32 tile = item / arguments.base.query_heads;
    const int2 place = __ldg(more.query_tiles + tile);  // row, rows
    float* lse = more.statistics + (static_cast<i64>(head) * more.num_query_tiles + tile) * kQueryRows;
    float* delta = lse + heads * more.num_query_tiles * kQueryRows;
    for (i32 row = lane; row < static_cast<i32>(kQueryRows); row += kWarp) {
      lse[row] = row < place.y ? rank.lse[(place.x + static_cast<i64>(row)) * heads + head] * kLog2e : -kMinusInfinity;
    }
    const i32 first = lane / kLanes;
    const i64 column = lane % kLanes * 8;
    const u16* output = reinterpret_cast<const u16*>(more.output_rows) + (place.x + first) * more.output_stride +
                        head * more.output_head_stride + column;
    const u16* gradient = reinterpret_cast<const u16*>(more.output_gradient_rows) +
                          (place.x + first) * more.output_gradient_stride + head * more.output_gradient_head_stride +
                          column;
#pragma unroll 4
    for (i32 row = first; row < static_cast<i32>(kQueryRows); row += kRows) {
      float sum = 0.0f;
      if (row < place.y) {
        const uint4 a = __ldg(reinterpret_cast<const uint4*>(output));
        const uint4 b = __ldg(reinterpret_cast<const uint4*>(gradient));
        sum = dot_halves<kBfloat16>(a.x, b.x) + dot_halves<kBfloat16>(a.y, b.y) + dot_halves<kBfloat16>(a.z, b.z) +
              dot_halves<kBfloat16>(a.w, b.w);
      }
      output += kRows * more.output_stride;
      gradient += kRows * more.output_gradient_stride;
#pragma unroll
      for (u32 step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
      if (lane % kLanes == 0) delta[row] = sum;
    }
  }
}

// dQ from its sums, which become zeros again. A warpgroup takes a query tile and head at a time.
__device__ __forceinline__ void convert_queries(const BackwardArguments& arguments, const BackwardRank& more,
                                                i32 cta) {
  const u32 thread = threadIdx.x % kWarpgroup;
  const i32 row = thread / kWarp * 16 + thread % kWarp / 4;
  const i64 stride = static_cast<i64>(arguments.base.query_heads) * kHeadDim;
  const u32 items = more.num_query_tiles * arguments.base.query_heads;
  const u32 workers = arguments.base.ctas_per_rank * kConsumers;
#pragma unroll 1
  for (u32 item = cta * kConsumers + threadIdx.x / kWarpgroup - 1; item < items; item += workers) {
    const u32 head = item % arguments.base.query_heads;
    const int2 place = __ldg(more.query_tiles + item / arguments.base.query_heads);  // row, rows
    float* sums = more.query_sums + static_cast<i64>(item) * (kQueryRows * kHeadDim) + thread * 4;
    u16* tile = more.query_gradient + place.x * stride + head * kHeadDim;
#pragma unroll
    for (u32 part = 0; part < kHeadDim / 32; ++part) {
      float values[16];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        const float4 taken = take_sums(sums + (4 * part + j) * 4 * kWarpgroup);
        values[4 * j] = taken.x * arguments.softmax_scale;
        values[4 * j + 1] = taken.y * arguments.softmax_scale;
        values[4 * j + 2] = taken.z * arguments.softmax_scale;
        values[4 * j + 3] = taken.w * arguments.softmax_scale;
      }
      store_row_pair<kBfloat16>(tile + 32 * part, stride, row, place.y, values);
    }
  }
}

// dK and dV of the rank's own keys that were summed in slots, once all contributions are in; sums and counts become
// zeros again. A warpgroup takes a slot and KV head at a time. After a failed wait there is nothing worth converting.
__device__ __forceinline__ void convert_keys(const BackwardArguments& arguments, const RankArguments& rank,
                                             const BackwardRank& more, i32 cta) {
  const u32 thread = threadIdx.x % kWarpgroup;
  const u32 group = threadIdx.x / kWarpgroup - 1;
  const i32 row = thread / kWarp * 16 + thread % kWarp / 4;
  const i32 kv_heads = arguments.base.kv_heads;
  const i64 stride = static_cast<i64>(kv_heads) * kHeadDim;
  const i32 groups = arguments.base.query_heads / kv_heads / arguments.heads_per_task;  // of one KV head
  char* arena = reinterpret_cast<char*>(rank.control);
  const i32 items = more.num_owned * kv_heads;
  const i32 workers = arguments.base.ctas_per_rank * kConsumers;
#pragma unroll 1
  for (i32 item = cta * kConsumers + group; item < items; item += workers) {
    const i32 kv_head = item % kv_heads;
    const int4 owned = __ldg(more.owned + item / kv_heads);  // slot, key_row, key_tokens, contributions
    u64* count = slot_count(arguments, arena, owned.x, kv_head);
    const u64 expected = static_cast<u64>(owned.w) * groups * kConsumers;
    // Every thread waits for itself: a failed wait is seen by all of them, since it stops the rank.
    if (!wait_count(arguments.base, rank, count, expected, WaitSite{kWaitGradient, -1, -1, owned.x})) return;
    named_barrier_sync(3 + group, kWarpgroup);
    if (thread == 0) signal_store_relaxed(count, 0);
#pragma unroll 1
    for (u32 part = 0; part < 2; ++part) {
      float* sums = slot_sums(arguments, arena, owned.x, kv_head, part);
      u16* tile = (part == 0 ? more.key_gradient : more.value_gradient) + owned.y * stride + kv_head * kHeadDim;
#pragma unroll 1
      for (u32 half = 0; half < 2; ++half) {
#pragma unroll
        for (u32 columns = 0; columns < kHeadDim / 32; ++columns) {
          float values[16];
#pragma unroll
          for (u32 j = 0; j < 4; ++j) {
            const float4 taken =
                take_sums(sums + half * (64 * kHeadDim) + (4 * columns + j) * 4 * kWarpgroup + thread * 4);
            values[4 * j] = taken.x;
            values[4 * j + 1] = taken.y;
            values[4 * j + 2] = taken.z;
            values[4 * j + 3] = taken.w;
          }
          store_row_pair<kBfloat16>(tile + 32 * columns, stride, row + 64 * half, owned.z, values);
        }
      }
    }
  }
}

}  // namespace megaring
