// The consumer role, one warpgroup: gradients of 64 keys against every query tile that the producer delivers.
//
// Scores are computed transposed, keys along the rows: S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in the layout
// that the products dV += P^T dO and dK += dS^T Q take from registers. Only dS^T passes through shared memory, where
// both warpgroups need all of it: each makes one half of the columns of dQ += dS K, and adds it in fp32 to memory.
#pragma once

#include "backward_phases.cuh"
#include "delay.cuh"
#include "fragments.cuh"
#include "signal.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace megaring {


// Warps 2 and 3 of the producer: each adds to memory what one consumer warpgroup stages, so that no consumer waits for
// the copy engine, which leaves its load and store unit free: additions from registers would block it.
__device__ __forceinline__ void add_staged(Shared shared) {
  const u32 group = threadIdx.x / kWarp - 2;
  const u32 staging = shared.staging(group);
  const bool leader = elect_one();
#pragma unroll 1
  while (true) {
    named_barrier_arrive(kStagingEmptyBarrier + group, kWarpgroup + kWarp);
    named_barrier_sync(kStagingFullBarrier + group, kWarpgroup + kWarp);
    delay_randomly();
    const Staged staged = shared.mailbox().staged[group];
    if (staged.sums == nullptr) return;
    if (leader) {
      bulk_add(staged.sums, staging, kStagingBytes / kConsumers);
      bulk_commit();
      bulk_wait_read<0>();
    }
    if (staged.num_counters == 0) continue;
    if (leader) {
      bulk_wait_written();
      __threadfence();
    }
    __syncwarp();
    for (i32 i = threadIdx.x % kWarp; i < staged.num_counters; i += kWarp) {
      counter_add_acq_rel(staged.counters + i * staged.stride, 1);
    }
    __syncwarp();
  }
}

class Differentiator {
 public:
  __device__ __forceinline__ Differentiator(const BackwardArguments& arguments, const RankArguments& rank,
                                            const BackwardRank& more, Shared shared)
      : arguments_(arguments), rank_(rank), more_(more), shared_(shared) {}

  __device__ __forceinline__ void run() {
    // Query tiles consumed so far, over all tasks; the highest bit is the parity of the items so far, which would need
    // a register more by itself.
    u32 block = 0;
#pragma unroll 1
    for (;; block ^= kItemParity) {
      wait(&mailbox().keys_full, block / kItemParity);
      const i32 kind = mailbox().task.kind;
      if (kind == kEnd) break;
      if (kind == kDifferentiate) {
        differentiate(block);
        continue;
      }
      const i32 chunk = mailbox().task.chunk;
      const i32 heads = mailbox().task.group;
      release(&mailbox().keys_empty);
      if (kind == kConvert) {
        convert_queries(arguments_, more_, chunk, heads);
        continue;
      }
      prepare(arguments_, rank_, more_, chunk, heads);
      fence_proxy_async();
      named_barrier_sync(kWarpgroupBarrier + group(), kWarpgroup);
      if (thread() == 0) counter_add_acq_rel(more_.counters + chunk * groups() + heads, 1);
    }
    named_barrier_sync(kStagingEmptyBarrier + group(), kWarpgroup + kWarp);
    if (thread() == 0) mailbox().staged[group()].sums = nullptr;
    named_barrier_arrive(kStagingFullBarrier + group(), kWarpgroup + kWarp);
  }

 private:
  static constexpr u32 kItemParity = 1u << 31;
  static constexpr u32 kSumRegisters = kHeadDim / 2;    // dK or dV: 64 keys by head dim
  static constexpr u32 kQueryRegisters = kHeadDim / 4;  // half of dQ: 64 queries by half of head dim

  static __device__ __forceinline__ u32 group() { return threadIdx.x / kWarpgroup - 1; }
  static __device__ __forceinline__ u32 thread() { return threadIdx.x % kWarpgroup; }
  static __device__ __forceinline__ u32 warp() { return thread() / kWarp; }
  static __device__ __forceinline__ u32 lane() { return threadIdx.x % kWarp; }
  static __device__ __forceinline__ u32 row() { return group() * 64 + warp() * 16 + lane() / 4; }
  static __device__ __forceinline__ u32 column() { return lane() % 4 * 2; }

  __device__ __forceinline__ Mailbox& mailbox() const { return shared_.mailbox(); }
  __device__ __forceinline__ i32 groups() const { return arguments_.base.query_heads / arguments_.heads_per_task; }

  __device__ __forceinline__ void wait(u64* barrier, u32 round) const {
    mbarrier_wait(shared_address(barrier), round % 2, pipeline_limit(arguments_.base));
  }

  __device__ __forceinline__ void release(u64* barrier) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(shared_address(barrier));
  }

  __device__ __forceinline__ void differentiate(u32& block) {
    float key_sums[kSumRegisters];
    float value_sums[kSumRegisters];
#pragma unroll
    for (u32 i = 0; i < kSumRegisters; ++i) key_sums[i] = value_sums[i] = 0.0f;
    const KeySlot& slot = mailbox().task;
    const i32 key_tokens = slot.key_tokens;
    if (key_tokens < static_cast<i32>(kTileRows)) {
      clear_rows(shared_.key(), kKeyHalfBytes, key_tokens, kTileRows);
      clear_rows(shared_.value(), kKeyHalfBytes, key_tokens, kTileRows);
    }
    constexpr i64 kPart = kQueryRows * kHeadDim;  // sums of one query tile and head
    float* query_sums = more_.query_sums + group() * (kPart / 2) +
                        (static_cast<i64>(slot.first_head) * more_.num_query_tiles + slot.query_begin) * kPart;
    const i32 count = slot.query_count;
    const u32 end = block + count * arguments_.heads_per_task;
    i32 tile = 0;
    float scores[32];
    float slopes[32];
    float query_part[kQueryRegisters];
    u32 packed[16];
    u32 packed_slopes[16];
    await_queries(block);
    start_scores(block, scores);
    start_slopes(block, slopes);
    finish_scores(block, key_tokens, offset_of(0), scores, slopes, packed, packed_slopes);
#pragma unroll 1
    for (; block + 1 < end; ++block) {
      delay_randomly();
      start_gradients(block, packed, packed_slopes, key_sums, value_sums, query_part);
      wgmma_wait<2>(value_sums);
      release(&mailbox().gradient_empty[block % kStages]);
      wgmma_wait<1>(query_part);
      stage(query_part, query_sums, false);
      await_queries(block + 1);
      start_scores(block + 1, scores);
      wgmma_wait<1>(key_sums);
      release(&mailbox().query_empty[block % kStages]);
      start_slopes(block + 1, slopes);
      ++tile;
      query_sums += kPart;
      if (tile == count) {
        query_sums += (more_.num_query_tiles - count) * kPart;
        tile = 0;
      }
      finish_scores(block + 1, key_tokens, offset_of(tile), scores, slopes, packed, packed_slopes);
    }
    start_gradients(block, packed, packed_slopes, key_sums, value_sums, query_part);
    wgmma_wait<2>(value_sums);
    release(&mailbox().gradient_empty[block % kStages]);
    wgmma_wait<1>(query_part);
    stage(query_part, query_sums, true);
    wgmma_wait<0>(key_sums);
    release(&mailbox().query_empty[block % kStages]);
    ++block;
    const KeySlot task = slot;
    release(&mailbox().keys_empty);
    store(task, key_sums, value_sums);
  }

  // Offset of a query tile's first row from the task's first key, 128 where causality hides nothing. Whether the task
  // lies on the diagonal is read each time: consumers have no register to keep it in.
  __device__ __forceinline__ i32 offset_of(i32 tile) const {
    return kCausal && tile < 2 && mailbox().task.diagonal ? tile * 64 : 128;
  }

  // Waits for a query tile and its output gradient.
  __device__ __forceinline__ void await_queries(u32 block) const {
    const u32 stage = block % kStages;
    wait(&mailbox().query_full[stage], block / kStages);
    wait(&mailbox().gradient_full[stage], block / kStages);
    const i32 rows = mailbox().rows[stage];
    if (rows < static_cast<i32>(kQueryRows)) {
      clear_rows(shared_.query(stage), kQueryHalfBytes, rows, kQueryRows);
      clear_rows(shared_.gradient(stage), kQueryHalfBytes, rows, kQueryRows);
    }
  }

  // Starts S^T of a query tile that is there.
  __device__ __forceinline__ void start_scores(u32 block, float (&scores)[32]) const {
    wgmma_fence();
    multiply_transposed(scores, shared_.key(), shared_.query(block % kStages));
    wgmma_commit();
  }

  // Starts dP^T of a query tile that is there.
  __device__ __forceinline__ void start_slopes(u32 block, float (&slopes)[32]) const {
    wgmma_fence();
    multiply_transposed(slopes, shared_.value(), shared_.gradient(block % kStages));
    wgmma_commit();
  }

  // Waits for S^T and dP^T, and makes of it P^T and dS^T, packed, and dS^T in shared memory too. `offset` is
  // that of the tile's first row from the first key, 128 where causality hides nothing.
  __device__ __forceinline__ void finish_scores(u32 block, i32 key_tokens, i32 offset, float (&scores)[32],
                                                float (&slopes)[32], u32 (&packed)[16],
                                                u32 (&packed_slopes)[16]) const {
    const u32 stage = block % kStages;
    wgmma_wait<1>(scores);
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
      const float2 lse = load_shared_f32x2(shared_.lse(stage) + (8 * j + column()) * 4);
      scores[4 * j] = exp2_fast(__fmaf_rn(scores[4 * j], arguments_.base.scale, -lse.x));
      scores[4 * j + 1] = exp2_fast(__fmaf_rn(scores[4 * j + 1], arguments_.base.scale, -lse.y));
      scores[4 * j + 2] = exp2_fast(__fmaf_rn(scores[4 * j + 2], arguments_.base.scale, -lse.x));
      scores[4 * j + 3] = exp2_fast(__fmaf_rn(scores[4 * j + 3], arguments_.base.scale, -lse.y));
    }
    if (key_tokens < static_cast<i32>(kTileRows) || offset < 128) mask(scores, key_tokens, offset);
    wgmma_wait<0>(slopes);
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
      const float2 delta = load_shared_f32x2(shared_.delta(stage) + (8 * j + column()) * 4);
      packed_slopes[2 * j] = pack_half<kBfloat16>(scores[4 * j] * (slopes[4 * j] - delta.x),
                                                  scores[4 * j + 1] * (slopes[4 * j + 1] - delta.y));
      packed_slopes[2 * j + 1] = pack_half<kBfloat16>(scores[4 * j + 2] * (slopes[4 * j + 2] - delta.x),
                                                      scores[4 * j + 3] * (slopes[4 * j + 3] - delta.y));
    }
    store_scores(shared_.scores(block % 2), packed_slopes);
#pragma unroll
    for (u32 i = 0; i < 16; ++i) packed[i] = pack_half<kBfloat16>(scores[2 * i], scores[2 * i + 1]);
    fence_proxy_async_shared();
  }

  // Starts dV, dQ and dK of a query tile whose scores are finished.
  __device__ __forceinline__ void start_gradients(u32 block, const u32 (&packed)[16], const u32 (&packed_slopes)[16],
                                                  float (&key_sums)[kSumRegisters], float (&value_sums)[kSumRegisters],
                                                  float (&query_part)[kQueryRegisters]) const {
    const u32 stage = block % kStages;
    wgmma_fence();
    multiply_queries(value_sums, packed, shared_.gradient(stage));
    wgmma_commit();
    named_barrier_sync(kScoreBarrier, kConsumers * kWarpgroup);
    wgmma_fence();
    multiply_keys(query_part, shared_.scores(block % 2));
    wgmma_commit();
    multiply_queries(key_sums, packed_slopes, shared_.query(stage));
    wgmma_commit();
  }

  // Hands this warpgroup's half of a query tile's dQ over to be added to memory. After the `last` tile of a task its
  // query chunks are told.
  __device__ __forceinline__ void stage(const float (&query_part)[kQueryRegisters], float* query_sums, bool last) const {
    named_barrier_sync(kStagingEmptyBarrier + group(), kWarpgroup + kWarp);
    const u32 staging = shared_.staging(group()) + thread() * 16;
#pragma unroll
    for (u32 j = 0; j < kQueryRegisters / 4; ++j) {
      store_shared(staging + j * kWarpgroup * 16,
                   uint4{__float_as_uint(query_part[4 * j]), __float_as_uint(query_part[4 * j + 1]),
                         __float_as_uint(query_part[4 * j + 2]), __float_as_uint(query_part[4 * j + 3])});
    }
    if (thread() == 0) {
      Staged& staged = mailbox().staged[group()];
      staged.sums = query_sums;
      staged.num_counters = 0;
      if (last) {
        const KeySlot& slot = mailbox().task;
        const i32 chunk = slot.query_begin / kChunkTiles;
        staged.num_counters = (slot.query_begin + slot.query_count - 1) / kChunkTiles - chunk + 1;
        staged.stride = groups();
        staged.counters = more_.counters + more_.num_counters + chunk * groups() + slot.group;
      }
    }
    fence_proxy_async_shared();
    named_barrier_arrive(kStagingFullBarrier + group(), kWarpgroup + kWarp);
  }

  // result[64 keys, 64 queries] = A[64 of 128 keys, head dim] x B[64 queries, head dim]^T.
  __device__ __forceinline__ void multiply_transposed(float (&result)[32], u32 keys, u32 queries) const {
    const u64 a = matrix_descriptor(keys + group() * 64 * 128, 16, 1024);
    const u64 b = matrix_descriptor(queries, 16, 1024);
#pragma unroll
    for (u32 step = 0; step < kHeadDim / 16; ++step) {
      const u32 within = step % 4 * 32;
      wgmma_ss<kBfloat16>(result, descriptor_advance(a, step / 4 * kKeyHalfBytes + within),
                          descriptor_advance(b, step / 4 * kQueryHalfBytes + within), step != 0);
    }
  }

  // sums[64 keys, head dim] += A[64 keys, 64 queries] x B[64 queries, head dim].
  __device__ __forceinline__ void multiply_queries(float (&sums)[kSumRegisters], const u32 (&packed)[16],
                                                   u32 queries) const {
    const u64 b = matrix_descriptor(queries, kQueryHalfBytes, 1024);
#pragma unroll
    for (u32 step = 0; step < kQueryRows / 16; ++step) {
      wgmma_rs<kBfloat16>(sums, packed + 4 * step, descriptor_advance(b, step * 2048));
    }
  }

  // result[64 queries, half of head dim] = dS[64 queries, 128 keys] x K[128 keys, this warpgroup's half].
  __device__ __forceinline__ void multiply_keys(float (&result)[kQueryRegisters], u32 scores) const {
    const u64 a = matrix_descriptor(scores, kScoreBytes, 1024);
    const u32 half = kHalves == 2 ? group() * kKeyHalfBytes : group() * 64;
    const u64 b = matrix_descriptor(shared_.key() + half, kKeyHalfBytes, 1024);
#pragma unroll
    for (u32 step = 0; step < kTileRows / 16; ++step) {
      wgmma_ss_transposed<kBfloat16>(result, descriptor_advance(a, step * 2048), descriptor_advance(b, step * 2048),
                                     step != 0);
    }
  }

  // Keys past the end of their chunk, and those that come after the query, have no probability.
  __device__ __forceinline__ void mask(float (&scores)[32], i32 key_tokens, i32 offset) const {
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
#pragma unroll
      for (u32 e = 0; e < 4; ++e) {
        const i32 key = row() + e / 2 * 8;
        const i32 query = offset + 8 * j + column() + e % 2;
        if (key >= key_tokens || key > query) scores[4 * j + e] = 0.0f;
      }
    }
  }

  // dS^T[64 keys of this warpgroup, 64 queries], two columns of 8 at a time.
  __device__ __forceinline__ void store_scores(u32 scores, const u32 (&packed)[16]) const {
    const u32 matrix_row = group() * 64 + warp() * 16 + lane() % 16;
#pragma unroll
    for (u32 j = 0; j < 8; j += 2) {
      store_matrices(scores + swizzled_offset(matrix_row, j + lane() / 16), packed + 2 * j);
    }
  }

  // Rows that belong to whatever follows in memory become zeros, since 0 x NaN is NaN. Both warpgroups write the same
  // zeros, each for itself.
  __device__ __forceinline__ void clear_rows(u32 tile, u32 half_bytes, u32 first, u32 rows) const {
    const u32 pieces = (rows - first) * 8;
    for (u32 i = thread(); i < pieces * kHalves; i += kWarpgroup) {
      store_shared(tile + i / pieces * half_bytes + first * 128 + i % pieces * 16, uint4{0, 0, 0, 0});
    }
    fence_proxy_async_shared();
    named_barrier_sync(kWarpgroupBarrier + group(), kWarpgroup);
  }

  // dK and dV of a task that nobody adds to are written as they are; others are added to their owner's sums.
  __device__ __forceinline__ void store(const KeySlot& task, float (&key_sums)[kSumRegisters],
                                        float (&value_sums)[kSumRegisters]) const {
#pragma unroll
    for (u32 i = 0; i < kSumRegisters; ++i) key_sums[i] *= arguments_.softmax_scale;
    if (task.slot < 0) {
      const i64 stride = static_cast<i64>(arguments_.base.kv_heads) * kHeadDim;
      const i64 start = task.key_row * stride + task.kv_head * static_cast<i64>(kHeadDim);
      store_rows<kBfloat16>(more_.key_gradient + start, stride, row(), task.key_tokens, key_sums);
      store_rows<kBfloat16>(more_.value_gradient + start, stride, row(), task.key_tokens, value_sums);
      return;
    }
    char* arena = arguments_.base.arenas[task.owner];
    add(slot_sums(arguments_, arena, task.slot, task.kv_head, 0), key_sums);
    add(slot_sums(arguments_, arena, task.slot, task.kv_head, 1), value_sums);
    named_barrier_sync(kWarpgroupBarrier + group(), kWarpgroup);
    if (thread() == 0) signal_add_release(slot_count(arguments_, arena, task.slot, task.kv_head), 1);
  }

  __device__ __forceinline__ void add(float* sums, const float (&values)[kSumRegisters]) const {
    float* place = sums + group() * (64 * kHeadDim) + thread() * 4;
#pragma unroll
    for (u32 j = 0; j < kSumRegisters / 4; ++j) sum_add_system(place + j * 4 * kWarpgroup, values + 4 * j);
  }

  const BackwardArguments& arguments_;
  const RankArguments& rank_;
  const BackwardRank& more_;
  const Shared shared_;
};

}  // namespace megaring
