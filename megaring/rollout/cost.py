"""What a step costs in each layout, and what a switch exposes (SPLASH, equations 4, 7 and 10 and table 2).

Times are seconds, loads are those of the busiest rank, b is bytes per activation element. A batch has N rows of which
the busiest owner has N_r; H query heads of width d_q return width d_z; d is the hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.calibration import Constants
from megaring.rollout.layout import CP, DOP, DP, OWNERS, TP, Layout
from megaring.rollout.manifest import Manifest
from megaring.rollout.shape import ModelShape

ACTIVATION_BYTES = 2  # b: activations are bf16 whatever the precision of weights and cache


@dataclass(frozen=True)
class Stages:
    """The terms of equation 10 for one step, each in seconds on the busiest rank.

    ``fixed`` is t_0, ``latency`` is delta, ``exchange`` is R, and ``overlap`` is eta: the fraction of attention under
    which the exchange may hide.
    """

    fixed: float
    projection_compute: float
    projection_read: float
    attention_compute: float
    attention_read: float
    latency: float
    exchange: float
    overlap: float = 0.0

    @property
    def attention(self) -> float:
        """t_att: the slower of arithmetic and cache reads."""
        return max(self.attention_compute, self.attention_read)

    @property
    def projection(self) -> float:
        """t_proj: the slower of arithmetic and weight reads."""
        return max(self.projection_compute, self.projection_read)

    @property
    def seconds(self) -> float:
        """t of equation 10."""
        exposed = max(0.0, self.exchange - self.overlap * self.attention)
        return self.fixed + self.projection + self.attention + self.latency + exposed


@dataclass(frozen=True, eq=False)
class Batch:
    """The work of one step. Arrays over requests: ``owner``, ``context`` (tokens, with this step's) and ``rows``.

    ``rows`` are query rows: one in decode, the chunk's tokens in prefill. Raises ValueError unless
    ``1 <= rows <= context``.
    """

    owner: NDArray[np.int64]
    context: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __post_init__(self) -> None:
        if not len(self.owner) == len(self.context) == len(self.rows):
            raise ValueError(f"{len(self.owner)} owners, {len(self.context)} contexts and {len(self.rows)} row counts")
        if len(self.rows) and not (self.rows.min() >= 1 and (self.rows <= self.context).all()):
            raise ValueError("a request has at least one row, and its context includes its rows")

    @classmethod
    def equal(cls, requests: int, context: int, rows: int, ranks: int) -> Self:
        """``requests`` equal requests, dealt to owners in turn."""
        return cls(np.arange(requests) % ranks, np.full(requests, context), np.full(requests, rows))

    def on_busiest_owner(self, values: NDArray, ranks: int) -> float:
        """The largest sum of ``values`` (one per request) over the requests of one owner."""
        return float(np.bincount(self.owner, values, minlength=ranks).max()) if len(values) else 0.0


def step_stages(shape: ModelShape, layout: Layout, ranks: int, batch: Batch, constants: Constants) -> Stages:
    """Predict one step of ``batch`` under ``layout``: loads of table 2, per layer, times the layers, over the rates."""
    layers, rows = shape.layers, int(batch.rows.sum())
    pairs = batch.rows * (batch.context - (batch.rows - 1) / 2)  # causal query-key pairs, of each request
    attention = 2.0 * pairs * shape.query_heads * (shape.query_width + shape.result_width)
    reads = batch.context * float(shape.layer_token_bytes)
    if layout.history == OWNERS:
        attention_load, read_load = batch.on_busiest_owner(attention, ranks), batch.on_busiest_owner(reads, ranks)
    else:
        attention_load = float(attention.sum()) / ranks
        read_load = float(reads.sum()) / (shape.head_split(ranks) if layout is TP else ranks)
    elements = sum(each.elements for each in shape.projections)
    share = 1 / ranks if layout.sharded_projections else 1.0
    projected = 2.0 * _projected_rows(layout, ranks, batch) * elements * share
    collectives, received = _exchange(shape, layout, ranks, batch)
    return Stages(
        fixed=_rest(shape, ranks, rows, constants),
        projection_compute=layers * projected / constants.projection_flops,
        projection_read=layers * share * shape.layer_projection_bytes / constants.weight_bandwidth if rows else 0.0,
        attention_compute=layers * attention_load / constants.attention_flops,
        attention_read=layers * read_load / constants.kv_bandwidth,
        latency=layers * collectives * constants.collective_latency,
        exchange=layers * received / constants.link_bandwidth,
        overlap=constants.overlap,
    )


def dop_exchange_bytes(shape: ModelShape, ranks: int, rows: int, element_bytes: int = ACTIVATION_BYTES) -> float:
    """V_DOP of equation 4: bytes that DOP's two exchanges of one layer move in the whole group."""
    return (1 - 1 / ranks) * rows * shape.query_heads * (shape.query_width + shape.result_width) * element_bytes


def transfer_seconds(manifest: Manifest, constants: Constants) -> float:
    """Time to move one layer of a switch: the busiest rank's bytes, and one latency for each collective."""
    busiest = max(
        max(manifest.received_bytes(rank), sum(each.bytes for part in manifest.sends(rank) for each in part))
        for rank in range(manifest.ranks)
    )
    collectives = bool(manifest.weight_transfers) + bool(manifest.kv_transfers)
    return busiest / constants.link_bandwidth + collectives * constants.collective_latency


def exposed_transfer(transfer: Sequence[float], compute: Sequence[float], early: float = 0.0) -> float:
    """Equation 7: the first layer's transfer, and what later ones outlast the computation of the layer before.

    ``transfer`` and ``compute`` are per layer. ``early`` is how much of the step before the switch the first transfer
    runs under: its history is complete once that step's first layer has appended. The paper has 0 there.
    """
    if len(transfer) != len(compute):
        raise ValueError(f"{len(transfer)} transfers and {len(compute)} computations; give one of each per layer")
    if not transfer:
        return 0.0
    later = sum(max(0.0, moved - hidden) for moved, hidden in zip(transfer[1:], compute[:-1], strict=True))
    return max(0.0, transfer[0] - early) + later


def _projected_rows(layout: Layout, ranks: int, batch: Batch) -> float:
    """Rows that go through the projections on the busiest rank.

    Owners project their own under DP. Under CP every rank projects all decode rows, which costs nothing while weight
    reads dominate, and its part of a chunk's.
    """
    if layout is DP:
        return batch.on_busiest_owner(batch.rows, ranks)
    if layout is CP:
        return float(np.where(batch.rows == 1, 1.0, batch.rows / ranks).sum())
    return float(batch.rows.sum())


def _exchange(shape: ModelShape, layout: Layout, ranks: int, batch: Batch) -> tuple[int, float]:
    """Collectives of one attention layer, and the bytes that the busiest rank receives in them."""
    rows, b = int(batch.rows.sum()), ACTIVATION_BYTES
    if ranks == 1 or not rows:
        return 0, 0.0
    remote = 1 - 1 / ranks
    gather = remote * rows * shape.hidden * b
    if layout is TP:
        return 1, 2 * gather  # a reduction and a gather, as one all-reduce
    if layout is DP:
        return 1, gather
    if layout is DOP:
        own = batch.on_busiest_owner(batch.rows, ranks)
        appended = own * shape.layer_token_bytes * (1 - 1 / shape.head_split(ranks))  # K and V of the rows' own heads
        return 3, dop_exchange_bytes(shape, ranks, 1, b) * own + appended + 2 * gather
    chunk_rows = int(batch.rows[batch.rows > 1].sum())
    partial = remote * rows * shape.query_heads * (shape.result_width + 1) * b  # results with their LSE, by rows
    queries = remote * chunk_rows * shape.query_heads * shape.query_width * b
    return 3 if chunk_rows else 2, partial + queries + gather


def _rest(shape: ModelShape, ranks: int, rows: int, constants: Constants) -> float:
    """t_0: what every layout does alike, from launch overhead to MLPs, experts and the output layer."""
    if not rows:
        return constants.step_overhead
    elements = shape.layers * shape.replicated_elements
    flops, read = 2.0 * rows * elements, float(elements)
    if shape.feed_forward is not None:
        flops += 2.0 * rows * shape.feed_forward.visited(shape.hidden, shape.layers) / ranks
        read += shape.feed_forward.read(shape.hidden, shape.layers, rows) / ranks
    reduce = 2 * (1 - 1 / ranks) * rows * shape.hidden * ACTIVATION_BYTES / constants.link_bandwidth
    collective = reduce + constants.collective_latency if ranks > 1 and shape.feed_forward is not None else 0.0
    return (
        constants.step_overhead
        + max(flops / constants.projection_flops, read * shape.weight_bytes / constants.weight_bandwidth)
        + shape.layers * collective
    )
