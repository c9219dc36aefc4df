"""Labels, masks, positions and dummy rows of one rank's microbatch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from buddyring import Placement
from megaring.data.microbatch import build_microbatch

ORACLE = Path(__file__).parents[4] / "shared/oracles/placement.json"


def make(lengths, groups, rank, *, ranks=2, tile=1, rank_multiple=1, targets=None):
    """Sequences whose token ids are 100 * sequence + position."""
    placement = Placement.from_groups(lengths, ranks, groups, tile=tile, rank_multiple=rank_multiple)
    arrays = [100 * index + np.arange(length, dtype=np.uint16) for index, length in enumerate(lengths)]
    return build_microbatch(placement, rank, arrays, targets=targets)


def labels_or_ignore(batch):
    pairs = zip(batch.labels[0].tolist(), batch.loss_mask[0].tolist(), strict=True)
    return [label if counts else "ignore" for label, counts in pairs]


def test_labels_are_those_of_the_oracle():
    if not ORACLE.exists():
        pytest.skip("the oracle file lies beside the checkout and is not there")
    case = next(c for c in json.loads(ORACLE.read_text())["zigzag"] if "labels_of_tokens_0_to_7" in c)
    for rank, labels in case["labels_of_tokens_0_to_7"].items():
        batch = make(case["lengths"], [(0, case["size"])], int(rank), tile=case["tile"])
        assert labels_or_ignore(batch) == labels


def test_two_sequences_keep_to_themselves():
    # 0..7 split over both ranks, 100..102 whole on rank 0: wrong would be 7 -> 100, or 102 -> anything.
    batch = make([8, 3], [(0, 2), (0, 1)], 0)
    assert batch.tokens.tolist() == [[0, 1, 6, 7, 100, 101, 102]]
    assert labels_or_ignore(batch) == [1, 2, 7, "ignore", 101, 102, "ignore"]
    assert batch.labels.tolist() == [[1, 2, 7, 0, 101, 102, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 6, 7, 0, 1, 2]]
    assert batch.padding_mask is None
    assert (batch.num_tokens, batch.target_tokens, batch.sum_squared_lengths) == (11, 9, 73)


def test_every_target_counts_once_over_all_ranks():
    lengths, groups = [37, 5, 1, 16], [(0, 4), (2, 2), (3, 1), (0, 2)]
    batches = [make(lengths, groups, rank, ranks=4) for rank in range(4)]
    predicted = sorted(
        (batch.tokens[0, row].item(), batch.labels[0, row].item())
        for batch in batches
        for row in torch.nonzero(batch.loss_mask[0])[:, 0]
    )
    assert predicted == [(100 * s + p, 100 * s + p + 1) for s, n in enumerate(lengths) for p in range(n - 1)]
    assert {batch.target_tokens for batch in batches} == {len(predicted)}


def test_dummy_rows():
    batch = make([5], [(0, 1)], 0, rank_multiple=4)
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4, 0, 0, 0]]
    assert batch.labels.tolist() == [[1, 2, 3, 4, 0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 0, 0]]
    assert batch.padding_mask.tolist() == [[False] * 5 + [True] * 3]


@pytest.mark.parametrize("rank_multiple", [1, 4])
def test_rank_without_tokens_gets_dummies(rank_multiple):
    batch = make([5], [(0, 1)], 1, rank_multiple=rank_multiple)
    assert batch.tokens.tolist() == batch.labels.tolist() == batch.position_ids.tolist() == [[0] * rank_multiple]
    assert batch.loss_mask.sum() == 0
    assert batch.padding_mask.all()
    assert batch.target_tokens == 4  # of the whole domain


def test_microbatch_without_sequences():
    batch = make([], [], 0)
    assert batch.tokens.shape == (1, 1)
    assert (batch.num_tokens, batch.target_tokens, batch.sum_squared_lengths) == (0, 0, 0)


def test_dtypes():
    batch = make([5], [(0, 1)], 0, rank_multiple=4)
    assert batch.tokens.dtype == batch.labels.dtype == batch.position_ids.dtype == torch.int64
    assert (batch.loss_mask.dtype, batch.padding_mask.dtype) == (torch.float32, torch.bool)


def test_one_supervised_token():
    targets = [np.arange(8) == 6]  # token 6 is predicted from token 5, which rank 1 holds
    left, right = (make([8], [(0, 2)], rank, targets=targets) for rank in (0, 1))
    assert labels_or_ignore(left) == ["ignore"] * 4
    assert labels_or_ignore(right) == ["ignore", "ignore", "ignore", 6]
    assert left.labels.tolist() == [[0, 0, 0, 0]]
    assert left.target_tokens == right.target_tokens == 1


def test_first_token_is_never_a_target():
    batch = make([4], [(0, 1)], 0, targets=[np.array([True, False, True, False])])
    assert labels_or_ignore(batch) == ["ignore", 2, "ignore", "ignore"]
    assert batch.target_tokens == 1


def test_lengths_must_be_those_planned():
    placement = Placement.from_groups([4, 5], 1, [(0, 1), (0, 1)])
    with pytest.raises(ValueError, match=r"sequences\[1\] has 6 tokens but was planned with 5"):
        build_microbatch(placement, 0, [np.zeros(4, np.int32), np.zeros(6, np.int32)])
    with pytest.raises(ValueError, match="1 sequences for a placement of 2"):
        build_microbatch(placement, 0, [np.zeros(4, np.int32)])


def test_to_moves_every_tensor():
    moved = make([5], [(0, 1)], 0, rank_multiple=4).to("meta")
    names = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")
    assert {getattr(moved, name).device.type for name in names} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_copy_to_a_gpu():
    batch = make([5], [(0, 1)], 0, rank_multiple=4)
    pinned = batch.pin_memory()
    assert pinned.tokens.is_pinned()
    assert pinned.padding_mask.is_pinned()
    moved = pinned.to("cuda")
    torch.cuda.synchronize()
    assert moved.tokens.is_cuda
    assert moved.tokens.cpu().tolist() == batch.tokens.tolist()
    assert moved.loss_mask.cpu().tolist() == batch.loss_mask.tolist()
