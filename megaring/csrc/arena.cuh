// The memory that ranks share, as the roles of a kernel address it.
#pragma once

#include "forward_arguments.cuh"

namespace megaring {

constexpr u32 kTileRows = 128;  // of keys: what is sent, waited for and flagged at once

// Stages of shared memory through which tiles are sent.
constexpr u32 kSendStages = 2;
constexpr u32 kSendBytes = 16384;

// The flag that a tile's keys (part 0) or values (part 1) of this epoch are in the arena that begins with `control`.
__device__ __forceinline__ u64* arena_flag(const Arguments& arguments, Control* control, u32 epoch, i32 tile, u32 part) {
  u64* flags = reinterpret_cast<u64*>(reinterpret_cast<char*>(control) + arguments.flags_offset);
  const u32 tiles = arguments.arena_rows / static_cast<i32>(kTileRows);
  return flags + 2 * (epoch % 2 * tiles + tile) + part;
}

// Waits inside the block end only when a partner's own bounded wait did, so they get a few times its bound.
__device__ __forceinline__ u64 pipeline_limit(const Arguments& arguments) { return 4 * arguments.timeout_ns; }

}  // namespace megaring
