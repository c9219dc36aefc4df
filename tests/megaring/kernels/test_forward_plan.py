import numpy as np
import pytest
from emulation import attend, deliver, poisoned, walk

from buddyring.placement import Placement
from megaring.errors import UserError
from megaring.kernels.forward_plan import TILE, heads_per_section, plan_forward

QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 1, 4
CASES = {
    "one rank": (1, [1, 127, 128, 129, 300, 513], [(0, 1)] * 6),
    "pairs": (2, [4, 130, 512, 1000, 700], [(0, 2), (0, 2), (0, 2), (0, 2), (1, 1)]),
    "mixed groups": (4, [1030, 600, 90, 2, 700, 129], [(0, 4), (2, 2), (0, 1), (3, 1), (0, 4), (0, 2)]),
    "eight ranks": (8, [16, 2200, 777, 40, 500], [(0, 8), (0, 8), (4, 4), (6, 2), (5, 1)]),
    "an empty rank": (4, [300, 50], [(0, 2), (0, 1)]),
}


def placement(name: str, rank_multiple: int = 1) -> Placement:
    ranks, lengths, groups = CASES[name]
    return Placement.from_groups(lengths, ranks, groups, rank_multiple=rank_multiple)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Attention over one whole sequence, in fp64."""
    ratio = q.shape[1] // k.shape[1]
    scores = q.transpose(1, 0, 2) @ k.repeat(ratio, axis=1).transpose(1, 2, 0) * scale
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[1:], dtype=bool)), scores, -np.inf)
    top = scores.max(axis=2, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(axis=2, keepdims=True)
    out = (p / total @ v.repeat(ratio, axis=1).transpose(1, 0, 2)).transpose(1, 0, 2)
    return out, (top + np.log(total))[:, :, 0].T


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_walking_the_plan_is_attention_over_whole_sequences(name, causal):
    made = placement(name, rank_multiple=8)
    rng = np.random.default_rng(0)
    total = sum(made.lengths)
    q = rng.standard_normal((total, QUERY_HEADS, HEAD_DIM))
    k, v = rng.standard_normal((2, total, KV_HEADS, HEAD_DIM))
    shards = [made.shards(rank) for rank in range(made.ranks)]
    plans = [plan_forward(each, causal=causal) for each in shards]

    def packed(tensor, each):
        out = poisoned(each.rows, *tensor.shape[1:])
        out[: each.num_tokens] = tensor[each.tokens]
        return out

    local = [[packed(tensor, each) for each in shards] for tensor in (q, k, v)]
    arenas = [deliver(plans, local[1]), deliver(plans, local[2])]
    output, lse = poisoned(*q.shape), poisoned(total, QUERY_HEADS)
    for rank, each in enumerate(shards):
        part, part_lse = attend(
            plans[rank], *(tensors[rank] for tensors in local), (arenas[0][rank], arenas[1][rank]), scale=0.3
        )
        output[each.tokens], lse[each.tokens] = part[: each.num_tokens], part_lse[: each.num_tokens]
        assert (part[each.num_tokens :] == 0).all() and (part_lse[each.num_tokens :] == -np.inf).all()

    first = 0
    for length in made.lengths:
        rows = slice(first, first + length)
        want, want_lse = dense(q[rows], k[rows], v[rows], 0.3, causal)
        np.testing.assert_allclose(output[rows], want, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(lse[rows], want_lse, rtol=1e-11, atol=1e-11)
        first += length


@pytest.mark.parametrize("name", CASES)
def test_every_arena_tile_has_one_sender_and_one_owner(name):
    made = placement(name)
    plans = [plan_forward(made.shards(rank)) for rank in range(made.ranks)]
    sent = {(peer, row): (plan.rank, tokens) for plan in plans for _, tokens, peer, row in plan.sends.tolist()}
    assert len(sent) == sum(len(plan.sends) for plan in plans)
    assert len(sent) == sum(plan.arena_tiles for plan in plans)
    for plan in plans:
        for row, tokens, remote, owner in plan.segments.tolist():
            for at in range(0, tokens if remote else 0, TILE):
                assert sent[plan.rank, row + at] == (owner, min(TILE, tokens - at))


def test_nothing_is_sent_that_causality_hides():
    made = Placement.from_groups([8 * 2 * TILE], 4, [(0, 4)])  # chunks of two tiles
    causal = [plan_forward(made.shards(rank)) for rank in range(4)]
    full = [plan_forward(made.shards(rank), causal=False) for rank in range(4)]
    # Member p needs three front chunks and the back chunks of the 3 - p members above it.
    assert [plan.arena_tiles for plan in causal] == [2 * (3 + 3 - p) for p in range(4)]
    assert [plan.arena_tiles for plan in full] == [2 * 6] * 4


def test_front_chunks_are_sent_before_back_ones():
    made = Placement.from_groups([2000, 3000], 4, [(0, 4), (0, 4)])
    for rank in range(4):
        shards, plan = made.shards(rank), plan_forward(made.shards(rank))
        positions = shards.positions[plan.sends[:, 0]]
        sequence = np.searchsorted(shards.cu_seqlens, plan.sends[:, 0], side="right") - 1
        back = positions >= shards.chunks[sequence, 1, 0]
        assert not (np.diff(back.astype(int)) < 0).any() and (rank == 0 or back.any())


def test_tiles_come_longest_first_and_own_chunk_first():
    plan = plan_forward(placement("mixed groups").shards(0))
    assert (np.diff(plan.tiles[:, 5]) <= 0).all()
    for tile in plan.tiles:
        steps = list(walk(plan, tile))
        assert [step[3] for step in steps] == [True] + [False] * (len(steps) - 1)
        remote = [step[2] for step in steps]
        assert remote == sorted(remote)


def test_a_diagonal_tile_ends_with_its_own_queries():
    plan = plan_forward(Placement.from_groups([300], 1, [(0, 1)]).shards(0))
    assert plan.tiles[:, [0, 1, 4, 5]].tolist() == [[256, 44, 300, 3], [128, 128, 256, 2], [0, 128, 128, 1]]


def test_ranks_that_planned_alike_share_a_digest():
    made, other = placement("pairs"), Placement.from_groups([4, 130], 2, [(0, 2), (0, 2)])
    digests = {plan_forward(made.shards(rank)).digest for rank in (0, 1)}
    assert len(digests) == 1
    assert plan_forward(made.shards(0), causal=False).digest not in digests
    assert plan_forward(other.shards(0)).digest not in digests


def test_unaligned_groups_are_refused():
    made = Placement.from_groups([600], 4, [(1, 2)])
    with pytest.raises(UserError, match="ring backend"):
        plan_forward(made.shards(1))


@pytest.mark.parametrize(
    ("tokens", "query_heads", "kv_heads", "head_dim", "expected"),
    [
        (65536, 32, 8, 128, 4),
        (8192, 32, 8, 128, 32),
        (32768, 32, 8, 128, 8),
        (300_000, 15, 5, 128, 3),
        (1, 3, 1, 64, 3),
    ],
)
def test_sections_of_heads_fit_the_l2_budget(tokens, query_heads, kv_heads, head_dim, expected):
    plan = plan_forward(Placement.from_groups([tokens], 1, [(0, 1)]).shards(0))
    assert heads_per_section(plan, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim) == expected
