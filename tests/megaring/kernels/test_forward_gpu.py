"""The forward kernel and each of its layers on a GPU. Without a Hopper GPU all of this skips."""

import pytest
import torch

from buddyring.placement import Placement
from megaring.kernels.arena import ArenaLayout, LocalDomain, PeerTimeout
from megaring.kernels.checks.forward import random_case, run_case, simple_cases
from megaring.kernels.checks.units import unit_checks
from megaring.kernels.forward_plan import plan_forward
from megaring.kernels.megaring_forward import RankCall, megaring_forward, to_device

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize(
    ("name", "run"), list(unit_checks()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_device_layer_alone(name, run):
    for what, error, limit in run():
        assert error <= limit, what


@pytest.mark.parametrize("case", simple_cases(), ids=lambda case: case.label)
@pytest.mark.parametrize("ping_pong", [True, False])
def test_one_difficulty_at_a_time(case, ping_pong):
    outcome = run_case(case, ping_pong=ping_pong)
    assert outcome.passed, outcome


@pytest.mark.parametrize("seed", range(40))
def test_random_mixes_against_fp64(seed):
    outcome = run_case(random_case(seed))
    assert outcome.passed, outcome


def test_a_peer_that_never_comes_is_an_error_with_its_record():
    device = torch.device("cuda", 0)
    plan = plan_forward(Placement.from_groups([4000, 300], 2, [(0, 2), (0, 1)]).shards(0))
    domain = LocalDomain(2, ArenaLayout(plan.arena_tiles, 2, 128), device)
    q, k, v = (torch.randn(plan.rows, heads, 128, device=device).bfloat16() for heads in (4, 2, 2))
    call = RankCall(to_device(plan, device), q, k, v, torch.zeros_like(q), torch.zeros(q.shape[:2], device=device))
    megaring_forward(domain, [call], softmax_scale=0.1, timeout_s=0.5)
    torch.cuda.synchronize()
    assert call.out.isnan().all() and call.lse.isnan().all()
    with pytest.raises(PeerTimeout, match="rank 0 waited for a tile from rank 1, sequence 0"):
        megaring_forward(domain, [call], softmax_scale=0.1, timeout_s=0.5)
