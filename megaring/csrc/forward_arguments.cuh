// What one forward launch receives: mirrored field by field in kernels/arguments.py.
//
// Words of a rank's arena, all 64-bit, system scope where another rank takes part:
//   word                 writer (scope)                  waiter                    value
//   epoch                last CTA out (gpu)              every CTA at its start    calls completed; this call is epoch + 1
//   counters             CTAs (gpu)                      -                         next task | CTAs out; 0 between calls
//   stop                 whoever times out (sys)         every remote wait         0, or why the arena is dead
//   done[r]              rank r's last CTA out (sys)     senders, before they push r's last epoch that is over << 32
//   flags[b][tile][kv]   sender of the tile (sys)        producer warp             epoch << 32 | digest of the placement
#pragma once

#include "tma.cuh"

namespace megaring {

constexpr u32 kLaunchRanks = 8;   // virtual ranks that can share one launch
constexpr u32 kDomainRanks = 16;  // ranks of one arena domain

struct Control {
  u64 epoch;
  u32 next_task;
  u32 ctas_out;
  u64 stop;
  u64 unused[13];
  u64 done[kDomainRanks];
};
static_assert(sizeof(Control) == 256, "the host lays the arena out from these sizes");

// Values of Control::stop and of Record::status.
constexpr u64 kStopHere = 1;
constexpr u64 kStopPeer = 2;

// Host-visible account of the wait that ran out, one per rank of the launch.
struct Record {
  u64 status;    // kStopHere or kStopPeer, written last
  u64 what;      // one of kWait..
  u64 rank;      // who waited
  u64 peer;      // for whom
  u64 sequence;  // of the step, for tiles
  u64 tile;      // of the arena, for tiles
  u64 expected;
  u64 seen;
};
constexpr u64 kWaitDone = 1;
constexpr u64 kWaitTile = 2;
constexpr u64 kWaitDigest = 3;
constexpr u64 kWaitGradient = 4;

// One query tile: up to 128 packed rows, and the segments of keys that they see, own chunk first.
struct Tile {
  i32 query_row;
  i32 query_rows;
  i32 segment_begin;
  i32 segment_end;
  i32 first_tokens;  // of the first segment; under causality it ends with this tile's own diagonal
  i32 kv_tiles;      // over all segments
  i32 sequence;
  i32 unused;
};
static_assert(sizeof(Tile) == 32, "read as two 16-byte words");

// A run of keys that starts a tile: rows of the rank's own tensors, or of the arena.
struct Segment {
  i32 row;
  i32 tokens;
  i32 remote;
  i32 owner;
};
static_assert(sizeof(Segment) == 16, "read as one 16-byte word");

// Up to 128 tokens of keys and values that `peer` needs in its arena.
struct Send {
  i32 source_row;
  i32 tokens;
  i32 peer;
  i32 arena_row;
};
static_assert(sizeof(Send) == 16, "read as one 16-byte word");

struct RankArguments {
  TensorMap query;
  TensorMap key;
  TensorMap value;
  TensorMap arena;
  u16* output;  // [rows, query heads, head dim]
  float* lse;   // [rows, query heads]
  const int4* tiles;
  const int4* segments;
  const int4* sends;
  const char* key_rows;
  const char* value_rows;
  u64 key_stride;  // bytes between rows
  u64 value_stride;
  Control* control;
  Record* record;
  i32 num_tiles;
  i32 num_sends;
  i32 tokens;  // rows that belong to sequences
  i32 rows;
  i32 rank;
  i32 unused[5];
};
static_assert(sizeof(RankArguments) == 640, "mirrored by the host");

struct Arguments {
  RankArguments ranks[kLaunchRanks];
  char* arenas[kDomainRanks];  // arena of every rank of the domain, as this GPU addresses it
  u64 timeout_ns;
  u64 flags_offset;  // bytes from the start of an arena
  u64 data_offset;
  i32 arena_rows;  // rows per buffer and of K and V each: a multiple of 128
  i32 domain_ranks;
  i32 ctas_per_rank;
  i32 query_heads;
  i32 kv_heads;
  i32 heads_per_section;
  u32 digest;
  float scale;  // softmax scale * log2(e)
  i32 unused[2];
};
static_assert(sizeof(Arguments) == 8 * 640 + 128 + 64, "mirrored by the host");

}  // namespace megaring
