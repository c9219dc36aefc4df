// Waits for other ranks, each with a bound: the first that runs out is recorded and stops all ranks.
#pragma once

#include "forward_arguments.cuh"
#include "signal.cuh"

namespace megaring {

// Where and for what a rank waits, as the record tells it.
struct WaitSite {
  u64 what;
  i32 peer;
  i32 sequence;
  i32 tile;
};

__device__ __forceinline__ void stop_ranks(const Arguments& arguments, const RankArguments& rank, const WaitSite& site,
                                           u64 expected, u64 seen) {
  if (signal_compare_swap(&rank.control->stop, 0, kStopHere) != 0) return;
  Record* record = rank.record;
  signal_store_relaxed(&record->what, site.what);
  signal_store_relaxed(&record->rank, rank.rank);
  signal_store_relaxed(&record->peer, site.peer);
  signal_store_relaxed(&record->sequence, site.sequence);
  signal_store_relaxed(&record->tile, site.tile);
  signal_store_relaxed(&record->expected, expected);
  signal_store_relaxed(&record->seen, seen);
#pragma unroll 1
  for (i32 peer = 0; peer < arguments.domain_ranks; ++peer) {
    if (peer == rank.rank) continue;
    signal_compare_swap(&reinterpret_cast<Control*>(arguments.arenas[peer])->stop, 0, kStopPeer);
  }
}

// Waits until `word` reaches the epoch of `expected` (its upper half). False when the bound ran out, when a rank stopped,
// and, if `exact`, when the lower half then differs: ranks that planned differently would mistake each other's tiles.
__device__ __forceinline__ bool wait_epoch(const Arguments& arguments, const RankArguments& rank, const u64* word,
                                           u64 expected, bool exact, WaitSite site) {
  const u64 start = nanoseconds();
  u64 seen;
  while (true) {
    seen = signal_load_acquire(word);
    if (seen >> 32 >= expected >> 32) {
      if (!exact || seen == expected) return true;
      site.what = kWaitDigest;
      break;
    }
    if (signal_load_relaxed(&rank.control->stop) != 0) return false;
    if (nanoseconds() - start > arguments.timeout_ns) break;
  }
  stop_ranks(arguments, rank, site, expected, seen);
  return false;
}

// Waits until `word` has counted to `expected`. False when the bound ran out and when a rank stopped.
__device__ __forceinline__ bool wait_count(const Arguments& arguments, const RankArguments& rank, const u64* word,
                                           u64 expected, const WaitSite& site) {
  const u64 start = nanoseconds();
  while (true) {
    const u64 seen = signal_load_acquire(word);
    if (seen >= expected) return true;
    if (signal_load_relaxed(&rank.control->stop) != 0) return false;
    if (nanoseconds() - start > arguments.timeout_ns) {
      stop_ranks(arguments, rank, site, expected, seen);
      return false;
    }
  }
}

}  // namespace megaring
