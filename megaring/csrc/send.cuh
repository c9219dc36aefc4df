// The transfer role, one lane of warp 1: pushes this rank's keys and values of split sequences into the arenas of the
// ranks that need them, through two stages of shared memory, and raises each tile's flags there.
#pragma once

#include "arena.cuh"
#include "delay.cuh"
#include "mbarrier.cuh"
#include "signal.cuh"
#include "watchdog.cuh"

namespace megaring {

// `Shared` is the kernel's shared memory: send(stage) is the address of a stage, send_full(stage) that of its barrier.
// kRowBytes is what one row of one KV head takes.
template <class Shared, u32 kRowBytes>
class Sender {
 public:
  __device__ __forceinline__ Sender(const Arguments& arguments, const RankArguments& rank, Shared shared, u32 epoch)
      : arguments_(arguments), rank_(rank), shared_(shared), epoch_(epoch) {}

  // Sends are dealt to the CTAs in the order of the list, which is that of need.
  __device__ __forceinline__ void run(i32 cta) {
    if (cta >= rank_.num_sends || !wait_for_room()) return;
#pragma unroll 1
    for (i32 item = cta; item < rank_.num_sends; item += arguments_.ctas_per_rank) {
      delay_randomly();
      const int4 send = __ldg(rank_.sends + item);  // source_row, tokens, peer, arena_row
#pragma unroll 1
      for (i32 part = 0; part < 2; ++part) push(send, part);
    }
  }

 private:
  // The buffer of this epoch was last read in the epoch before the previous one, by everybody.
  __device__ __forceinline__ bool wait_for_room() {
    const u64 least = epoch_ < 2 ? 0 : epoch_ - 2;
#pragma unroll 1
    for (i32 peer = 0; peer < arguments_.domain_ranks; ++peer) {
      if (peer == rank_.rank) continue;
      const WaitSite site{kWaitDone, peer, -1, -1};
      if (!wait_epoch(arguments_, rank_, &rank_.control->done[peer], least << 32, false, site)) return false;
    }
    return true;
  }

  // One tile of keys (part 0) or values (part 1), in pieces of whole rows that fit a stage.
  __device__ __forceinline__ void push(int4 send, i32 part) {
    const u32 row_bytes = arguments_.kv_heads * kRowBytes;
    const u64 stride = part == 0 ? rank_.key_stride : rank_.value_stride;
    const i32 piece_rows = kSendBytes / row_bytes;
    const i64 arena_row = static_cast<i64>(2 * (epoch_ % 2) + part) * arguments_.arena_rows + send.w;
    const char* source = (part == 0 ? rank_.key_rows : rank_.value_rows) + send.x * static_cast<i64>(stride);
    char* destination = arguments_.arenas[send.z] + arguments_.data_offset + arena_row * row_bytes;
    // A piece is fetched while the one before it is on its way out.
#pragma unroll 1
    for (i32 row = 0; row < send.y + piece_rows; row += piece_rows) {
      if (row < send.y) {
        bulk_wait_read<0>();  // the stage that is fetched into has left
        fetch(source, stride, row_bytes, min(piece_rows, send.y - row), pieces_);
        source += piece_rows * static_cast<i64>(stride);
      }
      if (row > 0) {
        const u32 bytes = min(piece_rows, send.y - row + piece_rows) * row_bytes;
        const u32 stage = (pieces_ - 1) % kSendStages;
        mbarrier_wait(shared_.send_full(stage), (pieces_ - 1) / kSendStages % 2, pipeline_limit(arguments_));
        bulk_store(destination, shared_.send(stage), bytes);
        bulk_commit();
        destination += bytes;
      }
      ++pieces_;
    }
    --pieces_;  // the last round fetched nothing
    bulk_wait_written();
    fence_proxy_async();
    Control* there = reinterpret_cast<Control*>(arguments_.arenas[send.z]);
    signal_store_release(arena_flag(arguments_, there, epoch_, send.w / static_cast<i32>(kTileRows), part),
                         static_cast<u64>(epoch_) << 32 | arguments_.digest);
  }

  __device__ __forceinline__ void fetch(const char* source, u64 stride, u32 row_bytes, i32 rows, u32 piece) {
    const u32 stage = piece % kSendStages;
    const u32 full = shared_.send_full(stage);
    u32 into = shared_.send(stage);
    mbarrier_arrive_expect(full, rows * row_bytes);
    const bool dense = stride == row_bytes;
    const u32 run_bytes = dense ? rows * row_bytes : row_bytes;
#pragma unroll 1
    for (i32 row = 0; row < (dense ? 1 : rows); ++row) {
      bulk_load(into, source, run_bytes, full);
      into += run_bytes;
      source += stride;
    }
  }

  const Arguments& arguments_;
  const RankArguments& rank_;
  const Shared shared_;
  const u32 epoch_;
  u32 pieces_ = 0;  // fetched so far; piece i goes through stage i % kSendStages
};

}  // namespace megaring
