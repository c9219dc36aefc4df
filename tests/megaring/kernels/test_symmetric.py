"""Arenas over several processes, with files that the processes map in place of symmetric memory."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import emulation
import pytest
import torch
import torch.distributed as dist

import megaring
from buddyring import Placement
from megaring.backends import Request, fused
from megaring.errors import UserError
from megaring.kernels import domains, ops, symmetric
from megaring.kernels import megaring_forward as launcher
from megaring.kernels.arena import ArenaLayout, PeerTimeout
from megaring.kernels.checks import calls as checks
from megaring.kernels.checks import pair
from megaring.kernels.checks.bank import Bank
from megaring.kernels.checks.forward import Case
from megaring.kernels.checks.mixes import run_mix
from megaring.kernels.forward_plan import plan_forward
from megaring.kernels.symmetric import Seat, SymmetricDomain, gather_seats, seats_refusal

CPU = torch.device("cpu")
LAYOUT = ArenaLayout(tiles=3, kv_heads=2, head_dim=64)


@contextlib.contextmanager
def mapped_files(folder):
    """Symmetric memory by files, and no GPU; yields the sizes of the rendezvous so far."""
    sizes = []

    def path(rank):
        return str(Path(folder) / f"{len(sizes)}_{rank}")

    def empty(size, dtype, device):
        sizes.append(size)
        return torch.from_file(path(dist.get_rank()), shared=True, size=size, dtype=dtype)

    def rendezvous(memory, group):
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        dist.barrier(group)
        whole = [torch.from_file(path(rank), shared=True, size=len(memory), dtype=torch.uint8) for rank in range(2)]
        return SimpleNamespace(
            get_buffer=lambda owner, shape, dtype, offset: whole[owner][offset : offset + shape[0]].view(shape)
        )

    real = torch.zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "symmetric_memory", SimpleNamespace(empty=empty, rendezvous=rendezvous))
        patch.setattr(symmetric, "gpu_name", lambda device: f"gpu {dist.get_rank()}")
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
        patch.setattr(torch, "zeros", lambda *args, pin_memory=False, **options: real(*args, **options))
        yield sizes


def write_to_each_other(rank, world_size, folder, per_process):
    group = dist.group.WORLD
    with mapped_files(folder):
        domain = SymmetricDomain(group, LAYOUT, CPU, ranks_per_process=per_process)
        clean = all(not arena.any() for arena in domain.arenas)
        dist.barrier()
        for target, arena in enumerate(domain.arenas):
            for local in domain.local:
                arena[local] = 16 * local + target + 1
        dist.barrier()
        mine = {local: domain.arenas[local][: domain.ranks].tolist() for local in domain.local}
        return clean, domain.ranks, mine, domain.record.shape, domain.layout, len(domain.arenas[0])


@pytest.mark.parametrize("per_process", [1, 2, 4])
def test_every_rank_reaches_every_arena(pool, tmp_path, per_process):
    results = pool.run(2, write_to_each_other, str(tmp_path), per_process)
    ranks = 2 * per_process
    for process, (clean, count, mine, record, layout, size) in enumerate(results):
        assert clean and count == ranks and record == (per_process, 8) and (layout, size) == (LAYOUT, LAYOUT.bytes)
        assert list(mine) == list(range(process * per_process, (process + 1) * per_process))
        for local, found in mine.items():
            assert found == [(16 * writer + local + 1) % 256 for writer in range(ranks)]


def want_different_arenas(rank, world_size, folder):
    with mapped_files(folder) as sizes:
        with pytest.raises(UserError) as caught:
            SymmetricDomain(dist.group.WORLD, ArenaLayout(3 + rank, 2, 64), CPU)
        return str(caught.value), sizes


def test_ranks_that_want_different_arenas_are_all_refused(pool, tmp_path):
    for message, sizes in pool.run(2, want_different_arenas, str(tmp_path)):
        assert "ranks 0 and 1 of the group want different arenas" in message and "'tiles': 4" in message
        assert sizes == [], "somebody allocated memory for it"


def look_around(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(symmetric, "gpu_name", lambda device: f"gpu {rank}")
        patch.setattr(symmetric.socket, "gethostname", lambda: "host")
        return gather_seats(dist.group.WORLD, CPU)


def test_seats_are_those_of_all_ranks(pool):
    seats = [Seat("host", "gpu 0"), Seat("host", "gpu 1")]
    assert pool.run(2, look_around) == [seats, seats]
    assert seats_refusal(seats) is None
    assert "on 2 hosts (a, b)" in seats_refusal([Seat("b", "x"), Seat("a", "y")])
    assert "the same GPU" in seats_refusal([seats[0], seats[0]])


# Which arena a call uses


def grow(rank, world_size, folder):
    group = dist.group.WORLD
    with mapped_files(folder) as sizes:
        made = domains.Domains()
        first = made.shared(group, CPU, 5, ArenaLayout(3, 2, 64))
        same = made.shared(group, CPU, 5, ArenaLayout(64, 2, 64))
        larger = made.shared(group, CPU, 5, ArenaLayout(65, 2, 64, slots=7))
        again = made.shared(group, CPU, 5, ArenaLayout(1, 2, 64, slots=64))
        other_stream = made.shared(group, CPU, 6, ArenaLayout(1, 2, 64))
        other_heads = made.shared(group, CPU, 5, ArenaLayout(1, 4, 64))
        made.check()
        larger.record[0, 0] = 2
        with pytest.raises(PeerTimeout, match="another rank stopped the call"):
            made.check()
        generation = made.generation
        made.drop(group, CPU)
        made.check()
        fresh = made.shared(group, CPU, 5, ArenaLayout(3, 2, 64))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            made.shared(group, CPU, 5, ArenaLayout(3, 2, 64))
            with pytest.raises(UserError, match="make the same call once before the capture"):
                made.shared(group, CPU, 5, ArenaLayout(65, 2, 64))
    return {
        "one for both": same is first and again is larger and larger is not first,
        "separate": len({id(each) for each in (larger, other_stream, other_heads, fresh)}) == 4,
        "tiles": [each.layout.tiles for each in (first, larger, other_stream, fresh)],
        "slots": [each.layout.slots for each in (first, larger)],
        "made": len(sizes),
        "generations": made.generation - generation,
    }


def test_an_arena_is_made_once_and_grows_when_a_step_needs_it(pool, tmp_path):
    for found in pool.run(2, grow, str(tmp_path)):
        assert found == {
            "one for both": True,
            "separate": True,
            "tiles": [64, 128, 64, 64],
            "slots": [0, 64],
            "made": 5,
            "generations": 1,
        }


# What a call on split sequences launches


class Kernel:
    """Notes what would be launched."""

    def __init__(self):
        self.launches = []

    def launch(self, blocks, threads, arguments):
        self.launches.append((blocks, arguments[0]))


def call_on_a_split_step(rank, world_size, folder):
    placement = Placement.from_groups([600, 40], 2, [(0, 2), (0, 1)])
    shards = megaring.to_device(placement.shards(rank), CPU)
    q, k, v = (torch.zeros(shards.shards.rows, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    kernel = Kernel()
    with mapped_files(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_domains", domains.Domains())
        patch.setattr(launcher, "load", lambda *arguments: kernel)
        patch.setattr(launcher, "multiprocessors", lambda device: 132)
        patch.setattr(launcher, "tensor_map", lambda tensor, *rest: bytes(128))
        request = Request(q, k, v, shards, dist.group.WORLD, 0.5, True, False)
        with torch.library._scoped_library("megaring", "IMPL") as library:
            library.impl("forward", ops.attend, "CPU")
            fused.attend(request)
            first = fused.site(shards, (4, 2, 64), group=dist.group.WORLD)
            fused.configure(timeout_s=2.0, reserved_sms=12)
            try:
                fused.attend(request)
            finally:
                fused.configure()
            fused.rebuild(dist.group.WORLD, CPU)
            fused.attend(request)
        fresh = fused.site(shards, (4, 2, 64), group=dist.group.WORLD)
        arenas = [arena.data_ptr() for arena in first.domain.arenas]
    (blocks, one), (fewer, two), (_, three) = kernel.launches
    return {
        "blocks": (blocks, fewer),
        "timeouts": (one.timeout_ns, two.timeout_ns),
        "arenas": [one.arenas[i] for i in range(2)] == arenas,
        "control": one.ranks[0].control == arenas[rank],
        "rank": (one.ranks[0].rank, one.domain_ranks, first.plan.plan.rank, list(first.domain.local)),
        "sends": one.ranks[0].num_sends,
        "digest": one.digest,
        "same arena": [one.arenas[i] == two.arenas[i] for i in range(2)],
        "rebuilt": fresh.domain is not first.domain and three.arenas[rank] != one.arenas[rank],
    }


def test_a_split_step_is_launched_on_the_shared_arena(pool, tmp_path):
    results = pool.run(2, call_on_a_split_step, str(tmp_path))
    for rank, found in enumerate(results):
        assert found["blocks"] == (132, 120) and found["timeouts"] == (60_000_000_000, 2_000_000_000)
        assert found["rank"] == (rank, 2, rank, [rank]) and found["sends"] > 0
        assert found["arenas"] and found["control"] and all(found["same arena"]) and found["rebuilt"]
    assert results[0]["digest"] == results[1]["digest"]


# The mixes over several processes


def judged_by_both(rank, world_size, folder, virtual):
    """The emulated kernel per process: it waits for the other's rows by a collective."""
    case = Case((300, 64, 140), 2 * virtual, ((0, 2 * virtual), (0, 1), (0, 2)), 4, 2, 8, torch.float16)
    placement = Placement.from_groups(case.lengths, case.ranks, case.groups)
    plans = [plan_forward(placement.shards(each)) for each in range(case.ranks)]

    def launch(domain, calls, *, softmax_scale):
        found = [None] * world_size
        dist.all_gather_object(found, [[getattr(call, name).double().numpy() for name in "kv"] for call in calls])
        k, v = ([part[i] for process in found for part in process] for i in range(2))
        arenas = list(zip(emulation.deliver(plans, k), emulation.deliver(plans, v), strict=True))
        for local, call in zip(domain.local, calls, strict=True):
            q = call.q.double().numpy()
            out, lse = emulation.attend(plans[local], q, k[local], v[local], arenas[local], softmax_scale)
            call.out.copy_(torch.from_numpy(out))
            call.lse.copy_(torch.from_numpy(lse))

    with mapped_files(folder) as sizes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "megaring_forward", launch)
        patch.setattr(torch.cuda, "synchronize", lambda *device: None)
        arenas = pair.Arenas(dist.group.WORLD, virtual, [case])
        bank = Bank("cpu")
        results = [run_mix(case, bank, group=dist.group.WORLD, make_domain=arenas.get) for _ in range(2)]
    return results, len(sizes)


@pytest.mark.parametrize("virtual", [1, 2])
def test_processes_judge_a_mix_together(pool, tmp_path, virtual):
    (one, rendezvous), (two, _) = pool.run(2, judged_by_both, str(tmp_path), virtual)
    assert one == two and rendezvous == 1
    assert all(result.passed and 0 < result.worst.output < 1e-3 for result in one)
