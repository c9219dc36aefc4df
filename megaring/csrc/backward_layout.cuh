// Compile-time choices of the backward kernel and its shared memory.
#pragma once

#include "arena.cuh"
#include "backward_arguments.cuh"
#include "mbarrier.cuh"

namespace megaring {

constexpr u32 kHeadDim = MEGARING_HEAD_DIM;
constexpr bool kBfloat16 = MEGARING_BFLOAT16;
constexpr bool kCausal = MEGARING_CAUSAL;

static_assert(kHeadDim == 64 || kHeadDim == 128, "the swizzled halves of a tile are 64 elements wide");

constexpr u32 kQueryRows = 64;  // of a query tile
constexpr u32 kConsumers = 2;   // warpgroups of 64 keys each
constexpr u32 kThreads = (1 + kConsumers) * kWarpgroup;
constexpr u32 kStages = 2;      // of query tiles and their gradients

// Register quotas, as in the forward.
constexpr u32 kLaunchRegisters = 168;
constexpr u32 kProducerRegisters = 56;
constexpr u32 kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= kLaunchRegisters * (1 + kConsumers),
              "quotas above the launch's registers would never be granted");

// Tiles in shared memory: kHeadDim / 64 halves of rows x 128 bytes, 128-byte swizzle.
constexpr u32 kHalves = kHeadDim / 64;
constexpr u32 kKeyHalfBytes = kTileRows * 128;
constexpr u32 kKeyBytes = kHalves * kKeyHalfBytes;
constexpr u32 kQueryHalfBytes = kQueryRows * 128;
constexpr u32 kQueryBytes = kHalves * kQueryHalfBytes;
constexpr u32 kStatisticsBytes = kQueryRows * 4;        // LSE or delta of a query tile
constexpr u32 kScoreBytes = kTileRows * kQueryRows * 2;  // dS^T: one swizzled half, 128 keys by 64 queries

// What the consumers do next.
struct KeySlot {
  i32 kind;  // of Item, or kEnd
  i32 chunk;  // to prepare or to convert
  i32 group;
  i32 key_row;
  i32 key_tokens;
  i32 owner;
  i32 slot;
  i32 query_begin;
  i32 query_count;
  i32 first_head;
  i32 kv_head;
  i32 diagonal;
};

constexpr i32 kEnd = -1;

// Half of a query tile's dQ that a consumer has staged.
struct Staged {
  float* sums;      // where to add it; null at the end
  u32* counters;    // to be raised once all of the task is added: one per query chunk
  i32 num_counters;  // 0 before the last query tile of a task
  i32 stride;
};

struct alignas(16) Mailbox {
  KeySlot task;
  Staged staged[kConsumers];
  i32 rows[kStages];  // that exist of the query tile in a stage
  u32 stopped;
  u64 keys_full;
  u64 keys_empty;
  u64 query_full[kStages];
  u64 query_empty[kStages];
  u64 gradient_full[kStages];
  u64 gradient_empty[kStages];
  u64 send_full[kSendStages];
};

constexpr u32 kKeyOffset = 0;
constexpr u32 kValueOffset = kKeyOffset + kKeyBytes;
constexpr u32 kQueryOffset = kValueOffset + kKeyBytes;
constexpr u32 kGradientOffset = kQueryOffset + kStages * kQueryBytes;
constexpr u32 kScoreOffset = kGradientOffset + kStages * kQueryBytes;
constexpr u32 kSendOffset = kScoreOffset + 2 * kScoreBytes;
constexpr u32 kStagingOffset = kSendOffset + kSendStages * kSendBytes;
constexpr u32 kStagingBytes = kQueryRows * kHeadDim * 4;  // dQ of a query tile, half by each consumer
constexpr u32 kStatisticsOffset = kStagingOffset + kStagingBytes;
constexpr u32 kMailboxOffset = kStatisticsOffset + kStages * 2 * kStatisticsBytes;
constexpr u32 kMailboxBytes = 512;
constexpr u32 kSharedBytes = kMailboxOffset + kMailboxBytes;
static_assert(sizeof(Mailbox) <= kMailboxBytes, "the mailbox has outgrown its room");
static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");

// Hardware barriers.
constexpr u32 kScoreBarrier = 1;         // both consumers have written their dS^T
constexpr u32 kWarpgroupBarrier = 3;     // 3 and 4: within one warpgroup
constexpr u32 kStagingFullBarrier = 5;   // 5 and 6: a consumer has staged its half of dQ
constexpr u32 kStagingEmptyBarrier = 7;  // 7 and 8: and that has left

struct Shared {
  char* base;

  __device__ __forceinline__ Mailbox& mailbox() const { return *reinterpret_cast<Mailbox*>(base + kMailboxOffset); }
  __device__ __forceinline__ u32 start() const { return shared_address(base); }
  __device__ __forceinline__ u32 key() const { return start() + kKeyOffset; }
  __device__ __forceinline__ u32 value() const { return start() + kValueOffset; }
  __device__ __forceinline__ u32 query(u32 stage) const { return start() + kQueryOffset + stage * kQueryBytes; }
  __device__ __forceinline__ u32 gradient(u32 stage) const { return start() + kGradientOffset + stage * kQueryBytes; }
  __device__ __forceinline__ u32 scores(u32 buffer) const { return start() + kScoreOffset + buffer * kScoreBytes; }
  __device__ __forceinline__ u32 lse(u32 stage) const {
    return start() + kStatisticsOffset + 2 * stage * kStatisticsBytes;
  }
  __device__ __forceinline__ u32 delta(u32 stage) const { return lse(stage) + kStatisticsBytes; }
  __device__ __forceinline__ u32 staging(u32 consumer) const {
    return start() + kStagingOffset + consumer * (kStagingBytes / kConsumers);
  }
  __device__ __forceinline__ u32 send(u32 stage) const { return start() + kSendOffset + stage * kSendBytes; }
  __device__ __forceinline__ u32 send_full(u32 stage) const { return shared_address(&mailbox().send_full[stage]); }
};

// Sums of dK (part 0) or dV (part 1) of one KV head in a slot of the arena that begins at `arena`.
__device__ __forceinline__ float* slot_sums(const BackwardArguments& arguments, char* arena, i32 slot, i32 kv_head,
                                            u32 part) {
  const i64 place = (static_cast<i64>(slot) * arguments.base.kv_heads + kv_head) * 2 + part;
  return reinterpret_cast<float*>(arena + arguments.sums_offset) + place * (kTileRows * kHeadDim);
}

__device__ __forceinline__ u64* slot_count(const BackwardArguments& arguments, char* arena, i32 slot, i32 kv_head) {
  return reinterpret_cast<u64*>(arena + arguments.counts_offset) +
         static_cast<i64>(slot) * arguments.base.kv_heads + kv_head;
}

}  // namespace megaring
