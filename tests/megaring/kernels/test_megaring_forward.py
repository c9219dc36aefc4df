"""What the launcher refuses and packs, without a GPU."""

import ctypes
import dataclasses

import pytest
import torch

from buddyring.placement import Placement
from megaring.errors import UserError
from megaring.kernels import megaring_forward as launcher
from megaring.kernels.arena import ArenaLayout, LocalDomain, PeerTimeout
from megaring.kernels.arguments import TensorMap
from megaring.kernels.forward_plan import plan_forward
from megaring.kernels.megaring_forward import RankCall, megaring_forward, to_device

CPU = torch.device("cpu")


class Launched(Exception):
    def __init__(self, blocks, threads, arguments):
        self.blocks, self.threads, self.arguments = blocks, threads, arguments


class FakeKernel:
    def launch(self, blocks, threads, arguments):
        raise Launched(blocks, threads, arguments)


@pytest.fixture
def domain(monkeypatch):
    """A domain of two ranks in host memory; launches raise what they would have launched."""
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **options: real(*args, **options))
    monkeypatch.setattr(launcher, "load", lambda *args: FakeKernel())
    monkeypatch.setattr(launcher, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launcher, "tensor_map", lambda tensor: bytes([tensor.shape[1]]) * 128)
    return LocalDomain(2, ArenaLayout(tiles=8, kv_heads=2, head_dim=64), CPU)


def calls(**changes):
    placement = Placement.from_groups([1200, 100, 40], 2, [(0, 2), (1, 1), (0, 1)], rank_multiple=8)
    made = []
    for rank in range(2):
        plan = to_device(plan_forward(placement.shards(rank)), CPU)
        rows = plan.plan.rows
        q, k, v, out = (torch.zeros(rows, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
        made.append(RankCall(plan, q, k, v, out, torch.zeros(rows, 4)))
    made[1] = dataclasses.replace(made[1], **changes)
    return made


def test_arguments_are_those_of_the_plan(domain):
    given = calls()
    with pytest.raises(Launched) as caught:
        megaring_forward(domain, given, softmax_scale=0.5, timeout_s=2.0, reserved_sms=11)
    launched = caught.value
    assert (launched.blocks, launched.threads) == (2 * 60, 384)
    (arguments,) = launched.arguments
    assert arguments.scale == pytest.approx(0.5 * 1.4426950408889634)
    assert (arguments.timeout_ns, arguments.ctas_per_rank, arguments.domain_ranks) == (2_000_000_000, 60, 2)
    assert (arguments.query_heads, arguments.kv_heads, arguments.heads_per_section) == (4, 2, 4)
    assert (arguments.flags_offset, arguments.arena_rows) == (256, 1024)
    assert arguments.data_offset % 1024 == 0 and arguments.data_offset >= 256 + 2 * 8 * 2 * 8
    assert arguments.digest == given[0].plan.plan.digest == given[1].plan.plan.digest
    for rank, call in enumerate(given):
        packed, plan = arguments.ranks[rank], call.plan.plan
        assert arguments.arenas[rank] == packed.control == domain.arenas[rank].data_ptr()
        assert (packed.num_tiles, packed.num_sends) == (len(plan.tiles), len(plan.sends)) and plan.sends.size
        assert (packed.tokens, packed.rows, packed.rank) == (plan.tokens, plan.rows, rank)
        assert (packed.output, packed.lse) == (call.out.data_ptr(), call.lse.data_ptr())
        assert (packed.key_rows, packed.key_stride) == (call.k.data_ptr(), 2 * 64 * 2)
        assert packed.record == domain.record.data_ptr() + 64 * rank
        heads = [bytes(getattr(packed, name))[0] for name in ("query", "key", "value", "arena")]
        assert heads == [4, 2, 2, 2]
    assert ctypes.sizeof(TensorMap) == 128


def test_the_arena_holds_two_buffers_of_keys_and_values(domain):
    assert domain.data(0, torch.bfloat16).shape == (2 * 2 * 8 * 128, 2, 64)
    assert domain.arenas[0].numel() == domain.layout.bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1000, 4, 64)}, "q is torch.float32; the fused backend takes bfloat16 or float16"),
        ({"k": torch.zeros(9, 2, 64, dtype=torch.bfloat16)}, "k has shape .* expected at least"),
        ({"v": torch.zeros(2000, 2, 65, dtype=torch.bfloat16)[:, :, :64]}, "v needs contiguous columns and 16-byte"),
        ({"q": torch.zeros(2000, 3, 64, dtype=torch.bfloat16)}, "3 query heads over 2 key and 2 value heads"),
        ({"lse": torch.zeros(3, 4)}, "lse must be contiguous float32"),
        ({"out": torch.zeros(2000, 4, 64, dtype=torch.bfloat16)}, "out must be contiguous and shaped as q"),
    ],
    ids=["type", "rows", "strides", "heads", "lse", "out"],
)
def test_tensors_that_do_not_fit_are_refused(domain, changes, message):
    with pytest.raises(UserError, match=message):
        megaring_forward(domain, calls(**changes), softmax_scale=1.0)


def test_calls_that_do_not_fit_are_refused(domain):
    given = calls()
    with pytest.raises(UserError, match="positive softmax_scale"):
        megaring_forward(domain, given, softmax_scale=-1.0)
    with pytest.raises(UserError, match="plan of rank 1 of 2"):
        megaring_forward(domain, given[::-1], softmax_scale=1.0)
    with pytest.raises(UserError, match="3 calls for a domain of 2 ranks here"):
        megaring_forward(domain, [*given, given[0]], softmax_scale=1.0)


def test_an_arena_that_is_too_small_or_of_other_heads_is_refused(domain):
    small = LocalDomain(2, ArenaLayout(tiles=1, kv_heads=2, head_dim=64), CPU)
    with pytest.raises(UserError, match="needs 5 arena tiles, the arena has 1"):
        megaring_forward(small, calls(), softmax_scale=1.0)
    other = LocalDomain(2, ArenaLayout(tiles=8, kv_heads=4, head_dim=64), CPU)
    with pytest.raises(UserError, match="laid out for 4 KV heads"):
        megaring_forward(other, calls(), softmax_scale=1.0)


def test_a_domain_has_at_most_eight_ranks_per_launch():
    with pytest.raises(UserError, match="1 to 8 ranks, not 9"):
        LocalDomain(9, ArenaLayout(tiles=0, kv_heads=1, head_dim=64), CPU)


def test_a_record_is_an_error_that_tells_it(domain):
    domain.check()
    domain.record[0] = torch.tensor([1, 2, 0, 1, 7, 3, 5 << 32 | 9, 4 << 32 | 9])
    domain.record[1, 0] = 2
    with pytest.raises(PeerTimeout) as caught:
        megaring_forward(domain, calls(), softmax_scale=1.0)
    message = str(caught.value)
    assert "rank 0 waited for a tile from rank 1, sequence 7, arena tile 3: expected 0x500000009" in message
    assert "another rank stopped the call" in message
