// The producer's role, one lane of warp 0: takes tasks off the rank's queue and feeds the consumers with a tile of keys
// and values, then with every query tile that sees it, for each query head of the task.
#pragma once

#include "backward_layout.cuh"
#include "delay.cuh"
#include "signal.cuh"
#include "tma.cuh"
#include "watchdog.cuh"

namespace megaring {

class Loader {
 public:
  __device__ __forceinline__ Loader(const BackwardArguments& arguments, const RankArguments& rank,
                                    const BackwardRank& more, Shared shared, u32 epoch)
      : arguments_(arguments), rank_(rank), more_(more), shared_(shared), epoch_(epoch) {}

  __device__ __forceinline__ void run() {
    Mailbox& mailbox = shared_.mailbox();
#pragma unroll 1
    for (u32 turn = 0;; ++turn) {
      const u32 next = counter_add_relaxed(&rank_.control->next_task, 1);
      mbarrier_wait(shared_address(&mailbox.keys_empty), turn % 2 ^ 1, pipeline_limit(arguments_.base));
      if (next >= static_cast<u32>(more_.num_items)) {
        mailbox.task.kind = kEnd;
        mbarrier_arrive(shared_address(&mailbox.keys_full));
        return;
      }
      const int4 item = __ldg(more_.items + next);  // kind, index, group, tasks
      if (item.x == kDifferentiate) {
        feed(item.y, item.z);
        continue;
      }
      if (item.x == kConvert) await_count(more_.num_counters + counter_of(item.y, item.z), kConsumers * item.w);
      mailbox.task.kind = item.x;
      mailbox.task.chunk = item.y;
      mailbox.task.group = item.z;
      mbarrier_arrive(shared_address(&mailbox.keys_full));
    }
  }

 private:
  __device__ __forceinline__ i32 counter_of(i32 chunk, i32 group) const {
    return chunk * (arguments_.base.query_heads / arguments_.heads_per_task) + group;
  }

  // Other CTAs of this rank raise these counters, by items that come earlier in the queue, and no item is dropped: after
  // a failed wait too, the rest of the queue is worked off with whatever there is.
  __device__ __forceinline__ void await_count(i32 counter, u32 expected) const {
    const u64 start = nanoseconds();
    while (counter_load_acquire(more_.counters + counter) < expected) {
      if (nanoseconds() - start > pipeline_limit(arguments_.base)) fault();
    }
  }

  __device__ __forceinline__ void feed(i32 task, i32 group) {
    const Arguments& base = arguments_.base;
    const u32 first_head = group * arguments_.heads_per_task;
    const i32 kv_head = first_head / (base.query_heads / base.kv_heads);
    const int4* entry = more_.key_tasks + 2 * task;
    const int4 keys = __ldg(entry);         // key_row, key_tokens, owner, remote
    const int4 queries = __ldg(entry + 1);  // query_begin, query_end, diagonal, slot

    Mailbox& mailbox = shared_.mailbox();
    mailbox.task = KeySlot{kDifferentiate, 0, group, keys.x, keys.y, keys.z, queries.w, queries.x,
                           queries.y - queries.x, static_cast<i32>(first_head), kv_head, queries.z};
    load_keys(keys, kv_head);
#pragma unroll 1
    for (i32 head = first_head; head < static_cast<i32>(first_head) + arguments_.heads_per_task; ++head) {
#pragma unroll 1
      for (i32 tile = queries.x; tile < queries.y; ++tile) {
        if (head == static_cast<i32>(first_head) && (tile == queries.x || tile % kChunkTiles == 0)) {
          await_count(counter_of(tile / kChunkTiles, group), kConsumers);
          fence_proxy_async();  // statistics come by ordinary stores and leave by the copy engine
        }
        load_queries(tile, head);
      }
    }
  }

  __device__ __forceinline__ void load_keys(int4 keys, i32 kv_head) {
    const u32 full = shared_address(&shared_.mailbox().keys_full);
    const TensorMap* key = &rank_.key;
    const TensorMap* value = &rank_.value;
    i32 key_row = keys.x;
    i32 value_row = keys.x;
    if (keys.w) {
      await(keys, 0);
      await(keys, 1);
      fence_proxy_async();
      key = value = &rank_.arena;
      key_row += 2 * (epoch_ % 2) * arguments_.base.arena_rows;
      value_row = key_row + arguments_.base.arena_rows;
    }
    const u64 policy = l2_evict_first();
    mbarrier_arrive_expect(full, 2 * kKeyBytes);
#pragma unroll
    for (u32 half = 0; half < kHalves; ++half) {
      tma_load(shared_.key() + half * kKeyHalfBytes, key, full, half * 64, kv_head, key_row, policy);
      tma_load(shared_.value() + half * kKeyHalfBytes, value, full, half * 64, kv_head, value_row, policy);
    }
  }

  // Once a wait has failed, tasks take whatever the arena holds and their results are replaced later.
  __device__ __forceinline__ void await(int4 keys, u32 part) {
    if (stopped_) return;
    const i32 arena_tile = keys.x / static_cast<i32>(kTileRows);
    const u64* flag = arena_flag(arguments_.base, rank_.control, epoch_, arena_tile, part);
    const u64 expected = static_cast<u64>(epoch_) << 32 | arguments_.base.digest;
    stopped_ = !wait_epoch(arguments_.base, rank_, flag, expected, true, WaitSite{kWaitTile, keys.z, -1, arena_tile});
  }

  __device__ __forceinline__ void load_queries(i32 tile, i32 head) {
    Mailbox& mailbox = shared_.mailbox();
    delay_randomly();
    const u32 stage = loaded_ % kStages;
    const u32 parity = loaded_ / kStages % 2 ^ 1;
    ++loaded_;
    const int2 place = __ldg(more_.query_tiles + tile);  // row, rows
    const float* statistics =
        more_.statistics + (static_cast<i64>(head) * more_.num_query_tiles + tile) * kQueryRows;
    const i64 deltas = static_cast<i64>(arguments_.base.query_heads) * more_.num_query_tiles * kQueryRows;
    const u64 policy = l2_evict_normal();

    mbarrier_wait(shared_address(&mailbox.query_empty[stage]), parity, pipeline_limit(arguments_.base));
    mailbox.rows[stage] = place.y;
    load_part(&more_.query, shared_.query(stage), shared_address(&mailbox.query_full[stage]), head, place.x, policy);
    bulk_load(shared_.lse(stage), statistics, kStatisticsBytes, shared_address(&mailbox.query_full[stage]));

    mbarrier_wait(shared_address(&mailbox.gradient_empty[stage]), parity, pipeline_limit(arguments_.base));
    load_part(&more_.output_gradient, shared_.gradient(stage), shared_address(&mailbox.gradient_full[stage]), head,
              place.x, policy);
    bulk_load(shared_.delta(stage), statistics + deltas, kStatisticsBytes,
              shared_address(&mailbox.gradient_full[stage]));
  }

  __device__ __forceinline__ void load_part(const TensorMap* map, u32 destination, u32 full, i32 head, i32 row,
                                            u64 policy) {
    mbarrier_arrive_expect(full, kQueryBytes + kStatisticsBytes);
#pragma unroll
    for (u32 half = 0; half < kHalves; ++half) {
      tma_load(destination + half * kQueryHalfBytes, map, full, half * 64, head, row, policy);
    }
  }

  const BackwardArguments& arguments_;
  const RankArguments& rank_;
  const BackwardRank& more_;
  const Shared shared_;
  const u32 epoch_;
  u32 loaded_ = 0;  // query tiles so far
  bool stopped_ = false;
};

}  // namespace megaring
