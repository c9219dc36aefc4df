// Attention backward of one rank's shards, all group sizes in one launch: dQ, dK and dV from Q, K, V, the output, its
// gradient and its log-sum-exp.
//
// A CTA is three warpgroups. The first one loads (warp 0), sends keys and values to other ranks as the forward does
// (warp 1), and adds dQ to memory (warps 2 and 3); the other two work off the rank's queue. A task is one tile of keys
// and a group of query heads of its KV head: dK and dV stay in registers all along, dQ is added in fp32. Chunks of query
// tiles are prepared before the first task that reads them and converted after the last one that adds to them, in the
// same queue, so that one CTA's memory traffic hides behind the products of others. Keys of other ranks give dK and dV
// that are added in fp32 to sums in their owner's memory, which converts them when all are in.
#include "backward_differentiate.cuh"
#include "backward_load.cuh"
#include "backward_phases.cuh"
#include "send.cuh"

namespace megaring {

__device__ __forceinline__ void init_barriers(Mailbox& mailbox) {
  constexpr u32 kConsumerWarps = kConsumers * kWarpgroup / kWarp;
  mbarrier_init(shared_address(&mailbox.keys_full), 1);
  mbarrier_init(shared_address(&mailbox.keys_empty), kConsumerWarps);
  for (u32 stage = 0; stage < kStages; ++stage) {
    mbarrier_init(shared_address(&mailbox.query_full[stage]), 1);
    mbarrier_init(shared_address(&mailbox.gradient_full[stage]), 1);
    mbarrier_init(shared_address(&mailbox.query_empty[stage]), kConsumerWarps);
    mbarrier_init(shared_address(&mailbox.gradient_empty[stage]), kConsumerWarps);
  }
  for (u32 stage = 0; stage < kSendStages; ++stage) mbarrier_init(shared_address(&mailbox.send_full[stage]), 1);
  mbarrier_init_fence();
}

// Rows [first, last) of all three gradients become `value` (two packed halves); `threads` threads share them.
__device__ __forceinline__ void fill_rows(const Arguments& arguments, const BackwardRank& more, i64 first, i64 last,
                                          u32 value, i64 thread, i64 threads) {
  u16* gradients[3] = {more.query_gradient, more.key_gradient, more.value_gradient};
#pragma unroll
  for (u32 part = 0; part < 3; ++part) {
    const i64 words = static_cast<i64>(part == 0 ? arguments.query_heads : arguments.kv_heads) * kHeadDim / 2;
    u32* gradient = reinterpret_cast<u32*>(gradients[part]);
    for (i64 i = first * words + thread; i < last * words; i += threads) gradient[i] = value;
  }
}

// The last CTA of a rank to leave readies its words for the next call, tells the others that their tiles have been read
// and, after a wait that ran out, turns all gradients into NaN.
__device__ __forceinline__ void leave(const Arguments& arguments, const RankArguments& rank, const BackwardRank& more,
                                      Mailbox& mailbox) {
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
  for (i32 i = threadIdx.x; i < 2 * more.num_counters; i += kThreads) more.counters[i] = 0;
  if (mailbox.stopped == kLastStopped) fill_rows(arguments, more, 0, rank.rows, 0x7FFF7FFF, threadIdx.x, kThreads);
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
    megaring_backward(const __grid_constant__ megaring::BackwardArguments arguments) {
  using namespace megaring;
  extern __shared__ __align__(1024) char shared_memory[];
  const Shared shared{shared_memory};
  const Arguments& base = arguments.base;
  const u32 slot = blockIdx.x / base.ctas_per_rank;
  const RankArguments& rank = base.ranks[slot];
  const BackwardRank& more = arguments.ranks[slot];
  const i32 cta = blockIdx.x % base.ctas_per_rank;
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
      if (elect_one()) Loader(arguments, rank, more, shared, epoch).run();
    } else if (warp == 1) {
      if (elect_one()) Sender<Shared, kHeadDim * 2>(base, rank, shared, epoch).run(cta);
    } else {
      const i64 thread = cta * 2 * kWarp + threadIdx.x % (2 * kWarp);
      fill_rows(base, more, rank.tokens, rank.rows, 0, thread, base.ctas_per_rank * 2 * kWarp);
      add_staged(shared);
    }
    __syncwarp();
  } else {
    raise_registers<kConsumerRegisters>();
    Differentiator(arguments, rank, more, shared).run();
    convert_keys(arguments, rank, more, cta);
  }
  leave(base, rank, more, shared.mailbox());
}
