// What the consumers of a backward call do before and after its tasks: statistics of the query rows, and conversion of
// the fp32 sums.
#pragma once

#include "backward_layout.cuh"
#include "fragments.cuh"
#include "signal.cuh"
#include "softmax.cuh"
#include "watchdog.cuh"

namespace megaring {

constexpr float kLog2e = 1.4426950408889634f;

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

// Query tiles of a chunk: [first, first + count).
struct ChunkTiles {
  u32 first;
  u32 count;

  __device__ __forceinline__ ChunkTiles(const BackwardRank& more, i32 chunk)
      : first(chunk * kChunkTiles), count(min(kChunkTiles, more.num_query_tiles - chunk * kChunkTiles)) {}
};

// Per query row and head of a chunk and group: LSE * log2(e), and delta = rowsum(output * its gradient). Rows that a
// tile lacks get +inf and 0, which makes their probabilities and slopes 0. A warp takes a tile and head at a time.
__device__ __forceinline__ void prepare(const BackwardArguments& arguments, const RankArguments& rank,
                                        const BackwardRank& more, i32 chunk, i32 group) {
  constexpr u32 kLanes = kHeadDim / 8;  // lanes that share a row, 16 bytes each
  constexpr u32 kRows = kWarp / kLanes;
  const u32 lane = threadIdx.x % kWarp;
  const i64 heads = arguments.base.query_heads;
  const ChunkTiles tiles(more, chunk);
#pragma unroll 1
  for (u32 item = threadIdx.x / kWarp - kWarpgroup / kWarp; item < tiles.count * arguments.heads_per_task;
       item += kConsumers * kWarpgroup / kWarp) {
    const u32 head = group * arguments.heads_per_task + item % arguments.heads_per_task;
    const u32 tile = tiles.first + item / arguments.heads_per_task;
    const int2 place = __ldg(more.query_tiles + tile);  // row, rows
    float* lse = more.statistics + (static_cast<i64>(head) * more.num_query_tiles + tile) * kQueryRows;
    float* delta = lse + heads * more.num_query_tiles * kQueryRows;
    for (i32 row = lane; row < static_cast<i32>(kQueryRows); row += kWarp) {
      lse[row] = row < place.y ? rank.lse[(place.x + static_cast<i64>(row)) * heads + head] * kLog2e : -kMinusInfinity;
    }
    // Rows in batches, the next one on its way while one is summed.
    constexpr u32 kBatch = 4;
    const i32 first = lane / kLanes;
    const i64 column = lane % kLanes * 8;
    const u16* output = reinterpret_cast<const u16*>(more.output_rows) + (place.x + first) * more.output_stride +
                        head * more.output_head_stride + column;
    const u16* gradient = reinterpret_cast<const u16*>(more.output_gradient_rows) +
                          (place.x + first) * more.output_gradient_stride + head * more.output_gradient_head_stride +
                          column;
    uint4 batch[2][kBatch][2];
    const auto fetch = [&](uint4(&rows)[kBatch][2], i32 row) {
#pragma unroll
      for (u32 i = 0; i < kBatch; ++i) {
        const bool there = row + static_cast<i32>(i * kRows) < place.y;
        const i64 at = (row - first) + static_cast<i64>(i) * kRows;
        rows[i][0] = there ? __ldg(reinterpret_cast<const uint4*>(output + at * more.output_stride)) : uint4{};
        rows[i][1] = there ? __ldg(reinterpret_cast<const uint4*>(gradient + at * more.output_gradient_stride)) : uint4{};
      }
    };
    fetch(batch[0], first);
#pragma unroll 2
    for (u32 n = 0; n < kQueryRows / (kBatch * kRows); ++n) {
      const i32 row = first + n * kBatch * kRows;
      if (n + 1 < kQueryRows / (kBatch * kRows)) fetch(batch[(n + 1) % 2], row + kBatch * kRows);
#pragma unroll
      for (u32 i = 0; i < kBatch; ++i) {
        const uint4 a = batch[n % 2][i][0];
        const uint4 b = batch[n % 2][i][1];
        float sum = dot_halves<kBfloat16>(a.x, b.x) + dot_halves<kBfloat16>(a.y, b.y) +
                    dot_halves<kBfloat16>(a.z, b.z) + dot_halves<kBfloat16>(a.w, b.w);
#pragma unroll
        for (u32 step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        if (lane % kLanes == 0) delta[row + i * kRows] = sum;
      }
    }
  }
}

// dQ of a chunk and group from its sums, which become zeros again. A warpgroup takes a query tile and head at a time.
__device__ __forceinline__ void convert_queries(const BackwardArguments& arguments, const BackwardRank& more,
                                                i32 chunk, i32 group) {
  constexpr i64 kPart = kQueryRows * kHeadDim;
  const u32 thread = threadIdx.x % kWarpgroup;
  const i32 row = thread / kWarp * 16 + thread % kWarp / 4;
  const i64 stride = static_cast<i64>(arguments.base.query_heads) * kHeadDim;
  constexpr u32 kParts = kHeadDim / 32;
  const ChunkTiles tiles(more, chunk);
  const u32 items = tiles.count * arguments.heads_per_task;
  const auto sums_of = [&](u32 item) {
    const u32 head = group * arguments.heads_per_task + item / tiles.count;
    return more.query_sums +
           (static_cast<i64>(head) * more.num_query_tiles + tiles.first + item % tiles.count) * kPart + thread * 4;
  };
  u32 item = threadIdx.x / kWarpgroup - 1;
  if (item >= items) return;
  // A part of the next tile is on its way while one of this tile is converted.
  float4 taken[kParts][4];
  float* sums = sums_of(item);
#pragma unroll
  for (u32 i = 0; i < kParts * 4; ++i) taken[i / 4][i % 4] = __ldcg(reinterpret_cast<const float4*>(sums + i * 4 * kWarpgroup));
#pragma unroll 1
  for (; item < items; item += kConsumers) {
    const u32 query_tile = tiles.first + item % tiles.count;
    const i64 head = group * arguments.heads_per_task + item / tiles.count;
    const int2 place = __ldg(more.query_tiles + query_tile);  // row, rows
    u16* tile = more.query_gradient + place.x * stride + head * kHeadDim;
    const bool more_items = item + kConsumers < items;
    float* next = more_items ? sums_of(item + kConsumers) : sums;
#pragma unroll
    for (u32 part = 0; part < kParts; ++part) {
      float values[16];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        values[4 * j] = taken[part][j].x * arguments.softmax_scale;
        values[4 * j + 1] = taken[part][j].y * arguments.softmax_scale;
        values[4 * j + 2] = taken[part][j].z * arguments.softmax_scale;
        values[4 * j + 3] = taken[part][j].w * arguments.softmax_scale;
        const u32 place_in_tile = (4 * part + j) * 4 * kWarpgroup;
        if (more_items) taken[part][j] = __ldcg(reinterpret_cast<const float4*>(next + place_in_tile));
        __stcg(reinterpret_cast<float4*>(sums + place_in_tile), float4{0.0f, 0.0f, 0.0f, 0.0f});
      }
      store_row_pair<kBfloat16>(tile + 32 * part, stride, row, place.y, values);
    }
    sums = next;
  }
}

// dK and dV of the rank's own keys that were summed in slots, once all contributions are in; sums and counts become
// zeros again. A warpgroup takes a slot and KV head at a time. After a failed wait it converts what is there, which is
// replaced later.
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
    // One thread waits, so that all go the same way; the barrier hands on what it has seen.
    if (thread == 0) {
      wait_count(arguments.base, rank, count, expected, WaitSite{kWaitGradient, -1, -1, owned.x});
      signal_store_relaxed(count, 0);
    }
    named_barrier_sync(kWarpgroupBarrier + group, kWarpgroup);
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
