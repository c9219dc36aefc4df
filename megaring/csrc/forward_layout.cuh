// Compile-time choices of the forward kernel and its shared memory.
#pragma once

#include "arena.cuh"
#include "mbarrier.cuh"

namespace megaring {

constexpr u32 kHeadDim = MEGARING_HEAD_DIM;
constexpr bool kBfloat16 = MEGARING_BFLOAT16;
constexpr bool kCausal = MEGARING_CAUSAL;
constexpr float kSlack = MEGARING_SLACK;        // of the softmax, in powers of two
constexpr bool kPingPong = MEGARING_PING_PONG;  // the two consumer warpgroups take turns on the tensor cores

static_assert(kHeadDim == 64 || kHeadDim == 128, "the swizzled halves of a tile are 64 elements wide");

constexpr u32 kConsumers = 2;  // warpgroups of 64 query rows each
constexpr u32 kThreads = (1 + kConsumers) * kWarpgroup;
constexpr u32 kStages = 2;

// Register quotas: (kProducerRegisters + 2 * kConsumerRegisters) * 128 is what 384 threads x 168 are launched with.
constexpr u32 kLaunchRegisters = 168;
constexpr u32 kProducerRegisters = 72;
constexpr u32 kConsumerRegisters = 216;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= kLaunchRegisters * (1 + kConsumers),
              "quotas above the launch's registers would never be granted");

// A tile in shared memory: kHeadDim / 64 halves of 128 rows x 128 bytes, 128-byte swizzle.
constexpr u32 kHalves = kHeadDim / 64;
constexpr u32 kHalfBytes = kTileRows * 128;
constexpr u32 kTileBytes = kHalves * kHalfBytes;

// What a key tile needs besides its data: columns that hold keys, and whether it lies on the diagonal.
constexpr u32 kDiagonal = 256;

struct TaskSlot {
  i32 query_row;
  i32 query_rows;
  i32 head;
  i32 kv_tiles;  // 0: no more tasks
};

struct alignas(16) Mailbox {
  TaskSlot tasks[kStages];
  u32 shapes[kStages];  // valid columns | kDiagonal, per key stage
  u32 stopped;
  u32 unused;
  u64 query_full[kStages];
  u64 query_empty[kStages];
  u64 keys_full[kStages];
  u64 values_full[kStages];
  u64 keys_empty[kStages];
  u64 values_empty[kStages];
  u64 send_full[kSendStages];
};

constexpr u32 kQueryOffset = 0;
constexpr u32 kKeyOffset = kQueryOffset + kStages * kTileBytes;
constexpr u32 kValueOffset = kKeyOffset + kStages * kTileBytes;
constexpr u32 kSendOffset = kValueOffset + kStages * kTileBytes;
constexpr u32 kMailboxOffset = kSendOffset + kSendStages * kSendBytes;
constexpr u32 kSharedBytes = kMailboxOffset + 1024;
static_assert(sizeof(Mailbox) <= 1024, "the mailbox has outgrown its room");
static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");

struct Shared {
  char* base;

  __device__ __forceinline__ Mailbox& mailbox() const { return *reinterpret_cast<Mailbox*>(base + kMailboxOffset); }
  __device__ __forceinline__ u32 query(u32 stage) const {
    return shared_address(base) + kQueryOffset + stage * kTileBytes;
  }
  __device__ __forceinline__ u32 key(u32 stage) const { return shared_address(base) + kKeyOffset + stage * kTileBytes; }
  __device__ __forceinline__ u32 value(u32 stage) const {
    return shared_address(base) + kValueOffset + stage * kTileBytes;
  }
  __device__ __forceinline__ u32 send(u32 stage) const {
    return shared_address(base) + kSendOffset + stage * kSendBytes;
  }
  __device__ __forceinline__ u32 send_full(u32 stage) const { return shared_address(&mailbox().send_full[stage]); }
};

}  // namespace megaring
