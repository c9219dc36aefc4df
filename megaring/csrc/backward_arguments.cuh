// What one backward launch receives besides the forward's arguments: mirrored field by field in kernels/arguments.py.
//
// More words and data of a rank's arena, behind what the forward uses:
//   counts[slot][kv head]        whoever adds to the slot (sys)   the owner, before it converts   contributions so far; 0 between calls
//   accumulators[slot][kv head]  likewise, fp32 sums of dK and dV; 0 between calls
#pragma once

#include "forward_arguments.cuh"

namespace megaring {

// One tile of keys and the contiguous range of query tiles that see it.
struct KeyTask {
  i32 key_row;     // of the rank's tensors, or of the arena
  i32 key_tokens;  // 1 to 128
  i32 owner;       // whose keys they are
  i32 remote;      // 1 if they come through the arena
  i32 query_begin;
  i32 query_end;
  i32 diagonal;  // 1 if the first two query tiles are those of the same tokens
  i32 slot;      // of the owner's accumulators; -1 where a task's sums are the gradients
};
static_assert(sizeof(KeyTask) == 32, "read as two 16-byte words");

// One entry of a rank's queue. Query tiles are prepared and converted by chunks of kChunkTiles, in numerical order.
struct Item {
  i32 kind;   // one of kDifferentiate, kPrepare, kConvert
  i32 index;  // of the key task, or of the query chunk
  i32 group;  // of query heads
  i32 tasks;  // to convert: key tasks whose dQ the chunk receives
};
static_assert(sizeof(Item) == 16, "read as one 16-byte word");
constexpr i32 kDifferentiate = 0;
constexpr i32 kPrepare = 1;
constexpr i32 kConvert = 2;
constexpr i32 kChunkTiles = 16;

// Up to 64 packed query rows of one chunk.
struct QueryTile {
  i32 row;
  i32 rows;
};
static_assert(sizeof(QueryTile) == 8, "read as one 8-byte word");

// A tile of the rank's own keys whose gradients are summed in a slot.
struct OwnedTile {
  i32 slot;
  i32 key_row;
  i32 key_tokens;
  i32 contributions;  // tasks per KV head and group of query heads, of all ranks
};
static_assert(sizeof(OwnedTile) == 16, "read as one 16-byte word");

struct BackwardRank {
  TensorMap query;            // boxes of 64 rows, as those of
  TensorMap output_gradient;  //
  const char* output_rows;    // of the forward, as the rows of its gradient: head dim contiguous
  const char* output_gradient_rows;
  i64 output_stride;  // elements between rows, then between heads
  i64 output_head_stride;
  i64 output_gradient_stride;
  i64 output_gradient_head_stride;
  const int4* key_tasks;
  const int4* items;  // of the queue
  const int2* query_tiles;
  const int4* owned;
  u32* counters;          // [2 (prepared, differentiated), query chunks * groups of heads]; 0 between calls
  float* statistics;      // [2 (LSE * log2(e), delta), query heads, query tiles * 64]
  float* query_sums;      // fp32 dQ, [query heads, query tiles, 64 * head dim] as the tensor cores hold it; 0 between calls
  u16* query_gradient;    // [rows, query heads, head dim]
  u16* key_gradient;      // [rows, kv heads, head dim]
  u16* value_gradient;
  i32 num_key_tasks;
  i32 num_query_tiles;
  i32 num_owned;
  i32 num_items;
  i32 num_counters;  // query chunks * groups of heads
  i32 unused[11];
};
static_assert(sizeof(BackwardRank) == 448, "mirrored by the host");

struct BackwardArguments {
  Arguments base;
  BackwardRank ranks[kLaunchRanks];
  u64 counts_offset;  // bytes from the start of an arena
  u64 sums_offset;
  i32 heads_per_task;  // query heads of one KV head that share a task: divides their ratio
  float softmax_scale;
  i32 unused[10];
};
static_assert(sizeof(BackwardArguments) == sizeof(Arguments) + 8 * sizeof(BackwardRank) + 64, "mirrored by the host");

}  // namespace megaring
