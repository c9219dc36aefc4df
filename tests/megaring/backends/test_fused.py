"""When the fused backend takes a call and when it says why not, without a GPU."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import megaring
from buddyring import Placement
from megaring import backends
from megaring.backends import Request, fused, reference
from megaring.device_shards import DeviceShards
from megaring.errors import UserError
from megaring.kernels import domains
from megaring.kernels.symmetric import Seat

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """Tensors without data that claim to be on a Hopper GPU."""
    fused._machine_refusal.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    fused._machine_refusal.cache_clear()


def request(
    placement,
    rank=0,
    *,
    heads=(4, 2),
    head_dim=128,
    dtype=torch.bfloat16,
    gradients=False,
    deterministic=False,
    group=None,
):
    shards = placement.shards(rank)
    empty = torch.empty(0)
    on_gpu = DeviceShards(shards, GPU, empty, empty, empty)
    q, k, v = (
        torch.empty(shards.rows, count, head_dim, dtype=dtype, device=GPU, requires_grad=gradients)
        for count in (heads[0], heads[1], heads[1])
    )
    return Request(q, k, v, on_gpu, group, head_dim**-0.5, True, deterministic)


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
        ({"gradients": True, "deterministic": True}, "its backward adds in no fixed order"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(hopper, changes, reason):
    assert fused.refusal(request(ONE, **changes)).startswith(reason)
    with pytest.raises(ValueError, match=f"'fused' cannot take this call .fused: {reason}"):
        backends.choose("fused", request(ONE, **changes))


def test_gradients_are_taken_and_deterministic_ones_refused_only_where_wanted(hopper):
    assert fused.refusal(request(ONE, gradients=True)) is None
    assert fused.refusal(request(ONE, deterministic=True)) is None, "the forward is bit-equal from call to call"
    with torch.no_grad():
        assert fused.refusal(request(ONE, gradients=True, deterministic=True)) is None


def test_what_is_known_at_the_start_of_training_is_told_then(hopper):
    assert fused.start_refusal(GPU, torch.bfloat16, 128, False) is None
    assert fused.start_refusal(GPU, torch.float32, 128, False) == "it takes bf16 or fp16, not torch.float32"
    assert fused.start_refusal(GPU, torch.bfloat16, 32, False) == "it takes a head dimension of 64 or 128, not 32"
    assert fused.start_refusal(GPU, torch.bfloat16, 64, True).startswith("its backward adds in no fixed order")
    assert fused.start_refusal(torch.device("cpu"), torch.bfloat16, 64, False) == "it needs a Hopper GPU, not cpu"


@pytest.mark.parametrize(("capability", "device"), [((8, 0), "cuda:0"), ((10, 0), "cuda:0")])
def test_another_gpu_is_refused(hopper, monkeypatch, capability, device):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert fused.refusal(request(ONE)) == f"it needs a Hopper GPU, and q is on {device}"


def test_auto_prefers_it_with_gradients_too_unless_they_have_to_be_deterministic(hopper):
    assert backends.choose("auto", request(ONE)).name == "fused"
    assert backends.choose("auto", request(ONE, gradients=True)).name == "fused"
    ordered = backends.choose("auto", request(ONE, gradients=True, deterministic=True))
    assert ordered.name == "ring" and ordered.refusals[0].startswith("fused: its backward adds in no fixed order")


SPLIT = Placement.from_groups([300, 20], 4, [(0, 2), (3, 1)])


@pytest.fixture
def seats(monkeypatch):
    """Where the ranks of every group say they are; counts the look-ups."""
    asked = []
    found = [Seat("here", f"gpu {rank}") for rank in range(4)]

    def gather(group, device):
        asked.append(group)
        return found

    monkeypatch.setattr(domains, "gather_seats", gather)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fused, "_domains", domains.Domains())
    return SimpleNamespace(asked=asked, found=found)


def test_a_step_that_splits_sequences_asks_once_where_its_ranks_are(hopper, seats):
    for rank in range(4):  # those that hold nothing of the split one as well: a domain must not choose two backends
        assert fused.refusal(request(SPLIT, rank, group="group")) is None
    assert seats.asked == ["group"]
    whole = Placement.from_groups([300, 20], 4, [(0, 1), (3, 1)])
    assert [fused.refusal(request(whole, rank, group="other")) for rank in range(4)] == [None] * 4
    assert seats.asked == ["group"]


def test_auto_passes_it_over_where_sequences_are_split(hopper, seats):
    assert backends.choose("fused", request(SPLIT, group="group", gradients=True)).name == "fused"
    passed_over = backends.choose("auto", request(SPLIT, group="group"))
    assert passed_over.name == "ring"
    assert passed_over.refusals[0].startswith("fused: it has not been run on several GPUs yet")


@pytest.mark.parametrize(
    ("seat", "reason"),
    [
        (Seat("there", "gpu 3"), "its ranks are on 2 hosts (here, there)"),
        (Seat("here", "gpu 1"), "several of its ranks use the same GPU"),
    ],
)
def test_ranks_that_cannot_reach_each_other_are_refused_by_all(hopper, seats, seat, reason):
    seats.found[3] = seat
    for rank in range(4):
        assert fused.refusal(request(SPLIT, rank, group="group")).startswith(reason)


@pytest.mark.parametrize(
    ("placement", "changes", "reason"),
    [
        (SPLIT, {"heads": (128, 128)}, "it sends at most 64 KV heads of 128, not 128"),
        (Placement.from_groups([300], 32, [(0, 2)]), {}, "it splits sequences over at most 16 ranks, not 32"),
        (SPLIT, {"gradients": True, "deterministic": True}, "its backward adds in no fixed order"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anybody_is_asked(hopper, seats, placement, changes, reason):
    assert fused.refusal(request(placement, group="group", **changes)).startswith(reason)
    assert seats.asked == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": float("inf")}, "timeout_s is inf"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"reserved_sms": -1}, "reserved_sms is -1"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(UserError, match=message):
        fused.configure(**setting)


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
