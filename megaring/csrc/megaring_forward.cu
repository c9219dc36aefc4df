// Attention forward of one rank's shards, all group sizes in one launch: out = softmax(Q K^T * scale) V and its LSE.
//
// A CTA is three warpgroups. The first one loads (warp 0), sends to other ranks (warp 1) and clears rows that belong to
// no sequence (warps 2 and 3); the other two attend, 64 query rows each. Every CTA of the grid works for one rank, one
// launch can carry several virtual ranks. A task is one (query tile, head) and walks all keys that it sees, waiting for
// remote tiles one by one, so nothing is merged and results do not depend on timing.
#include "forward_attend.cuh"
#include "forward_load.cuh"
#include "send.cuh"

namespace megaring {

__device__ __forceinline__ void init_barriers(Mailbox& mailbox) {
  for (u32 stage = 0; stage < kStages; ++stage) {
    mbarrier_init(shared_address(&mailbox.query_full[stage]), 1);
    mbarrier_init(shared_address(&mailbox.keys_full[stage]), 1);
    mbarrier_init(shared_address(&mailbox.values_full[stage]), 1);
    constexpr u32 kConsumerWarps = kConsumers * kWarpgroup / kWarp;
    mbarrier_init(shared_address(&mailbox.query_empty[stage]), kConsumerWarps);
    mbarrier_init(shared_address(&mailbox.keys_empty[stage]), kConsumerWarps);
    mbarrier_init(shared_address(&mailbox.values_empty[stage]), kConsumerWarps);
  }
  for (u32 stage = 0; stage < kSendStages; ++stage) mbarrier_init(shared_address(&mailbox.send_full[stage]), 1);
  mbarrier_init_fence();
}

// Output rows [first, last) become `value` (two packed halves), their LSE `lse`; `threads` threads share them.
__device__ __forceinline__ void fill_rows(const Arguments& arguments, const RankArguments& rank, i64 first, i64 last,
                                          u32 value, float lse, i64 thread, i64 threads) {
  const i64 words = static_cast<i64>(arguments.query_heads) * kHeadDim / 2;
  u32* output = reinterpret_cast<u32*>(rank.output);
  for (i64 i = first * words + thread; i < last * words; i += threads) output[i] = value;
  const i64 heads = arguments.query_heads;
  for (i64 i = first * heads + thread; i < last * heads; i += threads) rank.lse[i] = lse;
}

// The last CTA of a rank to leave readies its words for the next call, tells the others that their tiles have been read
// and, after a wait that ran out, turns all outputs into NaN.
__device__ __forceinline__ void leave(const Arguments& arguments, const RankArguments& rank, Mailbox& mailbox) {
  Control* control = rank.control;
  __syncthreads();
  constexpr u32 kNotLast = 0, kLast = 1, kLastStopped = 2;
  if (threadIdx.x == 0) {
    __threadfence();
    const u32 out = counter_add_acq_rel(&control->ctas_out, 1);
    mailbox.stopped = out != arguments.ctas_per_rank - 1 ? kNotLast
                      : signal_load_acquire(&control->stop) == 0 ? kLast
                                                                 : kLastStopped;
  }
  __syncthreads();
  if (mailbox.stopped == kNotLast) return;
  if (mailbox.stopped == kLastStopped) {
    fill_rows(arguments, rank, 0, rank.rows, 0x7FFF7FFF, __int_as_float(0x7FFFFFFF), threadIdx.x, kThreads);
  }
  if (threadIdx.x != 0) return;
  const u64 epoch = control->epoch + 1;
  if (mailbox.stopped == kLast) {
#pragma unroll 1
    for (i32 peer = 0; peer < arguments.domain_ranks; ++peer) {
      if (peer == rank.rank) continue;
      signal_store_release(&reinterpret_cast<Control*>(arguments.arenas[peer])->done[rank.rank], epoch << 32);
    }
  } else {
    signal_store_release(&rank.record->status, signal_load_relaxed(&control->stop));
  }
  control->next_task = 0;
  control->ctas_out = 0;
  control->epoch = epoch;
}

}  // namespace megaring

extern "C" __global__ void __launch_bounds__(megaring::kThreads, 1)
    megaring_forward(const __grid_constant__ megaring::Arguments arguments) {
  using namespace megaring;
  extern __shared__ __align__(1024) char shared_memory[];
  const Shared shared{shared_memory};
  const RankArguments& rank = arguments.ranks[blockIdx.x / arguments.ctas_per_rank];
  const i32 cta = blockIdx.x % arguments.ctas_per_rank;
  const u32 warp = threadIdx.x / kWarp;
  if (threadIdx.x == 0) {
    if (shared_address(shared_memory) % 1024 != 0) fault();  // swizzled tiles are addressed from 1024-byte starts
    init_barriers(shared.mailbox());
  }
  __syncthreads();

  if (warp < kWarpgroup / kWarp) {
    lower_registers<kProducerRegisters>();
    const u32 epoch = static_cast<u32>(rank.control->epoch) + 1;
    if (warp == 0) {
      if (elect_one()) Loader(arguments, rank, shared, epoch).run();
    } else if (warp == 1) {
      if (elect_one()) Sender<Shared, kHeadDim * 2>(arguments, rank, shared, epoch).run(cta);
    } else {
      const i64 thread = cta * 2 * kWarp + threadIdx.x % (2 * kWarp);
      fill_rows(arguments, rank, rank.tokens, rank.rows, 0, kMinusInfinity, thread,
                arguments.ctas_per_rank * 2 * kWarp);
    }
    __syncwarp();
  } else {
    raise_registers<kConsumerRegisters>();
    Attender(arguments, rank, shared).run();
  }
  leave(arguments, rank, shared.mailbox());
}
