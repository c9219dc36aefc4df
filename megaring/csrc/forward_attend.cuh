// The consumer role, one warpgroup: 64 query rows against every key tile that the producer delivers.
//
// Inside a warpgroup the scores of tile n + 1 are multiplied while the probabilities of tile n are, and the softmax of
// n + 1 runs beside the latter. Between the two warpgroups, turns on the tensor cores (kPingPong) put the softmax of one
// beside the products of the other.
#pragma once

#include "delay.cuh"
#include "forward_layout.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

namespace megaring {

constexpr u32 kTurnBarrier = 1;       // 1 and 2: whose turn it is
constexpr u32 kWarpgroupBarrier = 3;  // 3 and 4: within one warpgroup

class Attender {
 public:
  __device__ __forceinline__ Attender(const Arguments& arguments, const RankArguments& rank, Shared shared)
      : arguments_(arguments), rank_(rank), shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (kPingPong && group() == 1) named_barrier_arrive(kTurnBarrier, 2 * kWarpgroup);
    u32 tile = 0;  // key tiles consumed so far, over all tasks
    for (u32 turn = 0;; ++turn) {
      const u32 slot = turn % kStages;
      wait(&mailbox().query_full[slot], turn / kStages);
      if (mailbox().tasks[slot].kv_tiles == 0) break;
      attend(slot, tile);
    }
  }

 private:
  // Which of the two, and this thread's place in it.
  static __device__ __forceinline__ u32 group() { return threadIdx.x / kWarpgroup - 1; }
  static __device__ __forceinline__ u32 warp() { return threadIdx.x % kWarpgroup / kWarp; }
  static __device__ __forceinline__ u32 lane() { return threadIdx.x % kWarp; }
  static __device__ __forceinline__ u32 row() { return warp() * 16 + lane() / 4; }
  static __device__ __forceinline__ u32 column() { return lane() % 4 * 2; }

  __device__ __forceinline__ Mailbox& mailbox() const { return shared_.mailbox(); }

  __device__ __forceinline__ void wait(u64* barrier, u32 round) const {
    mbarrier_wait(shared_address(barrier), round % 2, pipeline_limit(arguments_));
  }

  // One arrival per warp, once all its lanes are through.
  __device__ __forceinline__ void release(u64* barrier) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(shared_address(barrier));
  }

  __device__ __forceinline__ void attend(u32 slot, u32& tile) {
    float output[kHeadDim / 2];
    float scores[kTileRows / 2];
    u32 probabilities[kTileRows / 4];
    SoftmaxState state;
    float rescale[2];
    const i32 kv_tiles = mailbox().tasks[slot].kv_tiles;
    const u32 query = shared_.query(slot) + group() * 64 * 128;

    wait(&mailbox().keys_full[tile % kStages], tile / kStages);
    u32 shape = mailbox().shapes[tile % kStages];
    wgmma_fence();
    multiply_keys(scores, query, tile % kStages);
    wgmma_commit();
    wgmma_wait<0>(scores);
    release(&mailbox().keys_empty[tile % kStages]);
    mask(scores, shape);
    softmax_step<true>(scores, state, rescale, arguments_.scale, kSlack);
    pack_probabilities<kBfloat16>(scores, probabilities);
#pragma unroll
    for (u32 i = 0; i < kHeadDim / 2; ++i) output[i] = 0.0f;

    if (kv_tiles > 1) wait(&mailbox().keys_full[(tile + 1) % kStages], (tile + 1) / kStages);
#pragma unroll 1
    for (i32 n = 1; n < kv_tiles; ++n) {
      delay_randomly();
      const u32 ahead = tile + 1;
      clear_value_tail(tile, shape);
      if constexpr (kPingPong) named_barrier_sync(kTurnBarrier + group(), 2 * kWarpgroup);
      wgmma_fence();
      multiply_keys(scores, query, ahead % kStages);
      wgmma_commit();
      wait(&mailbox().values_full[tile % kStages], tile / kStages);
      wgmma_fence();
      multiply_values(output, probabilities, tile % kStages);
      wgmma_commit();
      if constexpr (kPingPong) named_barrier_arrive(kTurnBarrier + 1 - group(), 2 * kWarpgroup);
      wgmma_wait<1>(scores);
      shape = mailbox().shapes[ahead % kStages];
      release(&mailbox().keys_empty[ahead % kStages]);
      mask(scores, shape);
      const bool outgrown = softmax_step<false>(scores, state, rescale, arguments_.scale, kSlack);
      // The next keys are awaited here and not where they are used, because this loop is what keeps ptxas from moving
      // the wait for P V before the softmax that should run beside it (a test reads the SASS for that).
      if (n + 1 < kv_tiles) wait(&mailbox().keys_full[(ahead + 1) % kStages], (ahead + 1) / kStages);
      wgmma_wait<0>(output);
      release(&mailbox().values_empty[tile % kStages]);
      pack_probabilities<kBfloat16>(scores, probabilities);
      if (outgrown) scale_rows(output, rescale);
      tile = ahead;
    }

    clear_value_tail(tile, shape);
    wait(&mailbox().values_full[tile % kStages], tile / kStages);
    wgmma_fence();
    multiply_values(output, probabilities, tile % kStages);
    wgmma_commit();
    wgmma_wait<0>(output);
    release(&mailbox().values_empty[tile % kStages]);
    ++tile;
    store(slot, query, output, state);
  }

  // scores[64, 128] = Q[64, head dim] x K[128, head dim]^T.
  __device__ __forceinline__ void multiply_keys(float (&scores)[kTileRows / 2], u32 query, u32 stage) const {
    const u64 a = matrix_descriptor(query, 16, 1024);
    const u64 b = matrix_descriptor(shared_.key(stage), 16, 1024);
#pragma unroll
    for (u32 step = 0; step < kHeadDim / 16; ++step) {
      const u32 offset = step / 4 * kHalfBytes + step % 4 * 32;
      wgmma_ss<kBfloat16>(scores, descriptor_advance(a, offset), descriptor_advance(b, offset), step != 0);
    }
  }

  // output[64, head dim] += P[64, 128] x V[128, head dim].
  __device__ __forceinline__ void multiply_values(float (&output)[kHeadDim / 2],
                                                  const u32 (&probabilities)[kTileRows / 4], u32 stage) const {
    const u64 b = matrix_descriptor(shared_.value(stage), kHalfBytes, 1024);
#pragma unroll
    for (u32 step = 0; step < kTileRows / 16; ++step) {
      wgmma_rs<kBfloat16>(output, probabilities + 4 * step, descriptor_advance(b, step * 2048));
    }
  }

  __device__ __forceinline__ void mask(float (&scores)[kTileRows / 2], u32 shape) const {
    if (shape == kTileRows) return;
    const u32 columns = shape % kDiagonal;
    const u32 tile_row = group() * 64 + row();
    const bool diagonal = kCausal && shape >= kDiagonal;
    mask_columns(scores, column(), diagonal ? min(columns, tile_row + 1) : columns,
                 diagonal ? min(columns, tile_row + 9) : columns);
  }

  // Rows of V past the end of a chunk belong to whatever follows in memory, and 0 x NaN is NaN. Both warpgroups write
  // the same zeros, each for itself.
  __device__ __forceinline__ void clear_value_tail(u32 tile, u32 shape) const {
    const u32 valid = shape % kDiagonal;
    if (valid == kTileRows) return;
    wait(&mailbox().values_full[tile % kStages], tile / kStages);
    const u32 rows = kTileRows - valid;
    for (u32 i = threadIdx.x % kWarpgroup; i < rows * kHalves * 8; i += kWarpgroup) {
      const u32 half = i / (rows * 8);
      const u32 within = i % (rows * 8);
      store_shared(shared_.value(tile % kStages) + half * kHalfBytes + valid * 128 + within * 16, uint4{0, 0, 0, 0});
    }
    fence_proxy_async_shared();
    named_barrier_sync(kWarpgroupBarrier + group(), kWarpgroup);
  }

  // Normalises, rounds and writes the rows that exist, through the query's own shared memory, where each warp reads back
  // only what it wrote.
  __device__ __forceinline__ void store(u32 slot, u32 query, float (&output)[kHeadDim / 2], SoftmaxState& state) const {
    const TaskSlot task = mailbox().tasks[slot];
    float inverse[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const float sum = quad_sum(state.sum[i]);
      inverse[i] = 1.0f / sum;
      const i32 tile_row = group() * 64 + row() + 8 * i;
      if (lane() % 4 == 0 && tile_row < task.query_rows) {
        rank_.lse[static_cast<i64>(task.query_row + tile_row) * arguments_.query_heads + task.head] =
            log_sum_exp(state.maximum[i], sum);
      }
    }
    scale_rows(output, inverse);
    named_barrier_sync(kWarpgroupBarrier + group(), kWarpgroup);  // no warp's products read the query any more
#pragma unroll
    for (u32 j = 0; j < kHeadDim / 8; ++j) {
      const u32 piece = query + j / 8 * kHalfBytes + column() * 2;
      store_shared(piece + swizzled_offset(row(), j % 8), pack_half<kBfloat16>(output[4 * j], output[4 * j + 1]));
      store_shared(piece + swizzled_offset(row() + 8, j % 8),
                   pack_half<kBfloat16>(output[4 * j + 2], output[4 * j + 3]));
    }
    __syncwarp();
    constexpr u32 kPieces = kHeadDim / 8;  // 16-byte pieces of a row
#pragma unroll
    for (u32 i = lane(); i < 16 * kPieces; i += kWarp) {
      const u32 group_row = warp() * 16 + i / kPieces;
      const u32 piece = i % kPieces;
      const i32 tile_row = group() * 64 + group_row;
      const uint4 data = load_shared_u32x4(query + piece / 8 * kHalfBytes + swizzled_offset(group_row, piece % 8));
      if (tile_row < task.query_rows) {
        const i64 place = static_cast<i64>(task.query_row + tile_row) * arguments_.query_heads + task.head;
        *reinterpret_cast<uint4*>(rank_.output + place * kHeadDim + piece * 8) = data;
      }
    }
    fence_proxy_async_shared();
    release(&mailbox().query_empty[slot]);
  }

  const Arguments& arguments_;
  const RankArguments& rank_;
  const Shared shared_;
};

}  // namespace megaring
