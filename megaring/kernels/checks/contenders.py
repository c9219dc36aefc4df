"""What the fused forward is timed against on one GPU, and the fused forward itself in its variants."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from buddyring.placement import Placement
from megaring.backends.local import flash3
from megaring.backends.local.segments import Segments
from megaring.kernels.checks.calls import prepare
from megaring.kernels.checks.race import Contender

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TIMEOUT_S = 5.0

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward_flops(lengths: Iterable[int]) -> float:
    """Useful operations of a causal forward: two products over the visible pairs of all query heads."""
    return 4.0 * HEAD_DIM * QUERY_HEADS * sum(length * (length + 1) // 2 for length in lengths)


def random_tensors(tokens: int, device: torch.device | str = "cuda") -> Tensors:
    """q ``[tokens, 32, 128]`` and k, v ``[tokens, 8, 128]``, bf16."""
    q, k, v = (torch.randn(tokens, heads, HEAD_DIM, device=device) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS))
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def fused(name: str, placement: Placement, tensors: Tensors, folder: Path | None, **options) -> Contender:
    """Our kernel on one rank or on virtual ones that share the GPU; ``options`` are those of ``megaring_forward``."""
    calls = prepare(placement, tensors)
    run = functools.partial(calls.launch, timeout_s=TIMEOUT_S, folder=folder, **options)
    return Contender(name, run, forward_flops(placement.lengths))


def library(name: str, backend: SDPBackend, lengths: tuple[int, ...], tensors: Tensors) -> Contender:
    """One of torch's kernels, on a dense batch: ``lengths`` are all the same."""
    parts = [part.view(len(lengths), lengths[0], -1, HEAD_DIM).transpose(1, 2) for part in tensors]

    def run(gqa: bool = True) -> object:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=gqa)

    try:
        run()
    except RuntimeError:  # a kernel without GQA gets each KV head as often as it is used
        parts[1:] = [part.repeat_interleave(QUERY_HEADS // KV_HEADS, dim=1) for part in parts[1:]]
        return Contender(name, functools.partial(run, gqa=False), forward_flops(lengths))
    return Contender(name, run, forward_flops(lengths))


def libraries(
    lengths: tuple[int, ...], tensors: Tensors, only: Sequence[str] = ("cudnn", "fa2", "fa3")
) -> list[Contender]:
    """cuDNN and FlashAttention-2 through torch, and FlashAttention-3 where its package can be imported."""
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
    found = [library(name, backend, lengths, tensors) for name, backend in backends.items() if name in only]
    device = tensors[0].device
    if "fa3" in only and flash3.refusal(device, tensors[0].dtype, HEAD_DIM) is None:
        counts = np.asarray(lengths)
        segments = Segments.build(counts, counts, device)
        run = functools.partial(flash3.forward, *tensors, segments, True, HEAD_DIM**-0.5)
        found.append(Contender("fa3", run, forward_flops(lengths)))
    return found


def parse_variant(text: str) -> tuple[str, Mapping[str, object]]:
    """``name: option=value, option=value`` as a name and options of a launch. Raises ValueError."""
    name, colon, rest = text.partition(":")
    options = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (SyntaxError, ValueError):
            equals = ""
        if not equals or not key.strip().isidentifier():
            raise ValueError(f"{item!r} is no option=value such as ping_pong=False")
    if not name.strip() or not colon:
        raise ValueError(f"{text!r} is no variant such as 'no turns: ping_pong=False'")
    return name.strip(), options
