"""When the fused backend takes a call and when it says why not, without a GPU."""

import logging

import pytest
import torch
from torch._subclasses import FakeTensorMode

import megaring
from buddyring import Placement
from megaring import backends
from megaring.backends import Request, fused, reference
from megaring.device_shards import DeviceShards

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """Tensors without data that claim to be on a Hopper GPU."""
    fused._machine_refusal.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    fused._machine_refusal.cache_clear()


def request(placement, rank=0, *, heads=(4, 2), head_dim=128, dtype=torch.bfloat16, gradients=False, group=None):
    shards = placement.shards(rank)
    empty = torch.empty(0)
    on_gpu = DeviceShards(shards, GPU, empty, empty, empty)
    q, k, v = (
        torch.empty(shards.rows, count, head_dim, dtype=dtype, device=GPU, requires_grad=gradients)
        for count in (heads[0], heads[1], heads[1])
    )
    return Request(q, k, v, on_gpu, group, head_dim**-0.5, True, False)


ONE = Placement.from_groups([300, 20], 1, [(0, 1), (0, 1)])


def test_it_takes_what_the_kernel_takes(hopper):
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (64, 128):
            assert fused.refusal(request(ONE, dtype=dtype, head_dim=head_dim)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "it takes bf16 or fp16, not torch.float32"),
        ({"head_dim": 96}, "it takes a head dimension of 64 or 128, not 96"),
        ({"gradients": True}, "it is forward-only until it has a backward: use it under torch.no_grad"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(hopper, changes, reason):
    assert fused.refusal(request(ONE, **changes)).startswith(reason)
    with pytest.raises(ValueError, match=f"'fused' cannot take this call .fused: {reason}"):
        backends.choose("fused", request(ONE, **changes))


def test_inputs_that_want_gradients_are_taken_under_no_grad(hopper):
    with torch.no_grad():
        assert fused.refusal(request(ONE, gradients=True)) is None


@pytest.mark.parametrize(("capability", "device"), [((8, 0), "cuda:0"), ((10, 0), "cuda:0")])
def test_another_gpu_is_refused(hopper, monkeypatch, capability, device):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert fused.refusal(request(ONE)) == f"it needs a Hopper GPU, and q is on {device}"


def test_auto_prefers_it_and_says_why_not_when_gradients_are_wanted(hopper):
    assert backends.choose("auto", request(ONE)).name == "fused"
    with_gradients = backends.choose("auto", request(ONE, gradients=True))
    assert with_gradients.name == "ring"
    assert with_gradients.refusals[0].startswith("fused: it is forward-only")


def test_every_rank_refuses_a_step_that_splits_a_sequence(hopper):
    placement = Placement.from_groups([300, 20], 4, [(0, 2), (3, 1)])
    for rank in range(4):  # those that hold nothing of it as well: a domain must not choose two backends
        assert "splits sequences" in fused.refusal(request(placement, rank))
    whole = Placement.from_groups([300, 20], 4, [(0, 1), (3, 1)])
    assert [fused.refusal(request(whole, rank)) for rank in range(4)] == [None] * 4


def test_a_capture_without_a_first_call_is_refused(monkeypatch):
    class Stream:
        cuda_stream = 1

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    shards = megaring.to_device(Placement.from_groups([5], 1, [(0, 1)]).shards(0), "cpu")
    x = torch.empty(5, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="make the same call once before the capture"):
        fused.attend(Request(x, x, x, shards, None, 1.0, True, False))


def test_the_log_names_the_choice(monkeypatch, caplog):
    from megaring.attention import _say

    _say.cache_clear()
    monkeypatch.setattr(fused, "refusal", lambda request: None)
    monkeypatch.setattr(fused, "attend", reference.attend)
    x = torch.ones(3, 1, 8)
    with caplog.at_level(logging.INFO, logger="megaring"):
        megaring.attention(x, x, x, Placement.from_groups([3], 1, [(0, 1)]).shards(0))
    assert [record.message for record in caplog.records] == ["attention backend: fused"]
