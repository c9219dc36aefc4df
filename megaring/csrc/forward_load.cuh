// The producer's role, one lane of warp 0: takes tasks off the rank's queue and feeds their tiles to the consumers.
#pragma once

#include "delay.cuh"
#include "forward_layout.cuh"
#include "signal.cuh"
#include "watchdog.cuh"

namespace megaring {

// Rows of K and V that one step works on, at most a tile of them.
struct KeyTile {
  i32 row;  // of the rank's tensors, or of the arena
  u32 shape;
  i32 owner;  // whose they are when they come through the arena, else -1
};

class Loader {
 public:
  __device__ __forceinline__ Loader(const Arguments& arguments, const RankArguments& rank, Shared shared, u32 epoch)
      : arguments_(arguments), rank_(rank), shared_(shared), epoch_(epoch) {}

  __device__ __forceinline__ void run() {
    const u32 num_tasks = rank_.num_tiles * arguments_.query_heads;
    u32 task = fetch();
#pragma unroll 1
    for (u32 turn = 0;; ++turn) {
      const u32 slot = turn % kStages;
      Mailbox& mailbox = shared_.mailbox();
      mbarrier_wait(shared_address(&mailbox.query_empty[slot]), turn / kStages % 2 ^ 1, pipeline_limit(arguments_));
      if (task >= num_tasks || stopped_) {
        mailbox.tasks[slot].kv_tiles = 0;
        mbarrier_arrive(shared_address(&mailbox.query_full[slot]));
        return;
      }
      task = feed(task, slot);
    }
  }

 private:
  __device__ __forceinline__ u32 fetch() { return counter_add_relaxed(&rank_.control->next_task, 1); }

  // Tasks run through sections of heads; inside one, through the tiles, longest first, and for each through its heads.
  // Returns the next task, asked for while this one's last tiles are still on their way.
  __device__ __forceinline__ u32 feed(u32 task, u32 slot) {
    const u32 per_section = rank_.num_tiles * arguments_.heads_per_section;
    const u32 first_head = task / per_section * arguments_.heads_per_section;
    const u32 width = min(arguments_.heads_per_section, arguments_.query_heads - first_head);
    const u32 head = first_head + task % per_section % width;
    const int4* tile = rank_.tiles + 2 * (task % per_section / width);
    const int4 place = __ldg(tile);       // query_row, query_rows, segment_begin, segment_end
    const int4 extent = __ldg(tile + 1);  // first_tokens, kv_tiles, sequence, unused
    kv_head_ = head / (arguments_.query_heads / arguments_.kv_heads);
    sequence_ = extent.z;

    Mailbox& mailbox = shared_.mailbox();
    mailbox.tasks[slot] = TaskSlot{place.x, place.y, static_cast<i32>(head), extent.y};
    const u32 full = shared_address(&mailbox.query_full[slot]);
    mbarrier_arrive_expect(full, kTileBytes);
    load_tile(shared_.query(slot), &rank_.query, full, head, place.x, l2_evict_first());

    open_segment(place.z);
    tokens_ = extent.x;
    at_ = (tokens_ - 1) / static_cast<i32>(kTileRows);
    ascending_ = false;
    KeyTile keys = {};
    u32 next_task = 0;
#pragma unroll 1
    for (i32 n = 0; n <= extent.y; ++n) {
      const KeyTile values = keys;  // one step behind the keys, in the order of use
      if (n < extent.y) {
        keys = next_tile(n == 0);
      } else {
        next_task = fetch();
      }
#pragma unroll 1
      for (u32 part = n == extent.y; part < (n == 0 ? 1 : 2); ++part) load(part == 0 ? keys : values, part, loaded_ + n);
    }
    loaded_ += extent.y;
    return next_task;
  }

  __device__ __forceinline__ void open_segment(i32 index) {
    const int4 segment = __ldg(rank_.segments + index);  // row, tokens, remote, owner
    segment_ = index;
    segment_row_ = segment.x;
    tokens_ = segment.y;
    owner_ = segment.z ? segment.w : -1;
  }

  // The own chunk from its end, so that the diagonal and its mask come first; the other segments as they arrive.
  __device__ __forceinline__ KeyTile next_tile(bool first) {
    if (ascending_ ? at_ * static_cast<i32>(kTileRows) >= tokens_ : at_ < 0) {
      open_segment(segment_ + 1);
      ascending_ = true;
      at_ = 0;
    }
    const i32 token = at_ * static_cast<i32>(kTileRows);
    u32 shape = min(tokens_ - token, static_cast<i32>(kTileRows));
    if (kCausal && first) shape |= kDiagonal;
    at_ += ascending_ ? 1 : -1;
    return KeyTile{segment_row_ + token, shape, owner_};
  }

  // Keys (part 0) of tile number `count` or values (part 1) of the one before it.
  __device__ __forceinline__ void load(KeyTile tile, u32 part, u32 count) {
    delay_randomly();
    const u32 stage = (count - part) % kStages;
    Mailbox& mailbox = shared_.mailbox();
    const u32 full = shared_address(&mailbox.keys_full[0]) + (part * kStages + stage) * 8;
    const u32 empty = shared_address(&mailbox.keys_empty[0]) + (part * kStages + stage) * 8;
    mbarrier_wait(empty, (count - part) / kStages % 2 ^ 1, pipeline_limit(arguments_));
    if (part == 0) mailbox.shapes[stage] = tile.shape;
    const TensorMap* map = part == 0 ? &rank_.key : &rank_.value;
    if (tile.owner >= 0) {
      await(tile, part);
      map = &rank_.arena;
      tile.row += (2 * (epoch_ % 2) + part) * arguments_.arena_rows;
    }
    mbarrier_arrive_expect(full, kTileBytes);
    load_tile(shared_.key(0) + (part * kStages + stage) * kTileBytes, map, full, kv_head_, tile.row, l2_evict_last());
  }

  // Once a wait has failed, the task at hand is finished with whatever the arena holds and its output replaced later.
  __device__ __forceinline__ void await(KeyTile tile, u32 part) {
    if (stopped_) return;
    const i32 arena_tile = tile.row / static_cast<i32>(kTileRows);
    const u64* flag = arena_flag(arguments_, rank_.control, epoch_, arena_tile, part);
    const u64 expected = static_cast<u64>(epoch_) << 32 | arguments_.digest;
    stopped_ = !wait_epoch(arguments_, rank_, flag, expected, true,
                           WaitSite{kWaitTile, tile.owner, sequence_, arena_tile});
    fence_proxy_async();
  }

  __device__ __forceinline__ void load_tile(u32 destination, const TensorMap* map, u32 full, u32 head, i32 row,
                                            u64 policy) {
#pragma unroll
    for (u32 half = 0; half < kHalves; ++half) {
      tma_load(destination + half * kHalfBytes, map, full, half * 64, head, row, policy);
    }
  }

  const Arguments& arguments_;
  const RankArguments& rank_;
  const Shared shared_;
  const u32 epoch_;
  u32 loaded_ = 0;  // key tiles of earlier tasks
  u32 kv_head_ = 0;
  i32 sequence_ = 0;
  i32 segment_ = 0;
  i32 segment_row_ = 0;
  i32 tokens_ = 0;
  i32 owner_ = 0;
  i32 at_ = 0;  // next tile of the segment
  bool ascending_ = false;
  bool stopped_ = false;
};

}  // namespace megaring
