"""What the fused backward is timed against on one GPU, and the fused backward itself in its variants.

All of them differentiate an output that is already there; the forward is outside of what is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from buddyring.placement import Placement
from megaring.backends import fused as fused_backend
from megaring.backends.local import flash3
from megaring.backends.local.segments import Segments
from megaring.device_shards import to_device
from megaring.kernels.backward_plan import choose_heads_per_task
from megaring.kernels.checks.contenders import HEAD_DIM, KV_HEADS, QUERY_HEADS, TIMEOUT_S, Tensors, forward_flops
from megaring.kernels.checks.gradient_calls import prepare_gradients
from megaring.kernels.checks.race import Contender
from megaring.kernels.driver import multiprocessors


def backward_flops(lengths: Iterable[int]) -> float:
    """Useful operations of a causal backward: five products, where the forward has two."""
    return 2.5 * forward_flops(lengths)


def random_gradient(tokens: int, device: torch.device | str = "cuda") -> torch.Tensor:
    """The output's gradient ``[tokens, 32, 128]``, bf16."""
    return torch.randn(tokens, QUERY_HEADS, HEAD_DIM, device=device).bfloat16()


def fused_backward(
    name: str,
    placement: Placement,
    tensors: Tensors,
    gradient: torch.Tensor,
    folder: Path | None,
    *,
    heads_per_task: int | None = None,
    **options,
) -> Contender:
    """Our kernel on one rank or on virtual ones that share the GPU; ``options`` are those of ``megaring_backward``.

    heads_per_task: by default what ``megaring.attention`` chooses for as many SMs as a rank has.
    """
    workers = multiprocessors(gradient.device.index) // placement.ranks
    heads = heads_per_task or choose_heads_per_task(placement, QUERY_HEADS, KV_HEADS, workers)
    calls = prepare_gradients(placement, tensors, gradient, heads_per_task=heads)
    calls.forwards.run(timeout_s=TIMEOUT_S, folder=folder)
    run = functools.partial(calls.launch, timeout_s=TIMEOUT_S, folder=folder, **options)
    return Contender(name, run, backward_flops(placement.lengths))


def library_backward(
    name: str, backend: SDPBackend, lengths: tuple[int, ...], tensors: Tensors, gradient: torch.Tensor
) -> Contender:
    """One of torch's kernels, on a dense batch: ``lengths`` are all the same.

    One whose backward does not take GQA gets each KV head as often as it is used, and is spared adding up their dK and
    dV. Raises RuntimeError for one that does not run at all.
    """
    batch = [part.view(len(lengths), lengths[0], -1, HEAD_DIM).transpose(1, 2) for part in (*tensors, gradient)]

    def made(gqa: bool) -> Callable[[], object]:
        copies = 1 if gqa else QUERY_HEADS // KV_HEADS
        keys = [part.repeat_interleave(copies, dim=1) if copies > 1 else part for part in batch[1:3]]
        leaves = [part.detach().requires_grad_() for part in (batch[0], *keys)]
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=gqa)
        like_out = torch.empty_like(out).copy_(batch[3])  # with the same strides, so that nobody has to copy it
        run = functools.partial(torch.autograd.grad, out, leaves, like_out, retain_graph=True)
        run()
        return run

    try:
        run = made(gqa=True)
    except RuntimeError:
        run = made(gqa=False)
    return Contender(name, run, backward_flops(lengths))


def backward_libraries(
    lengths: tuple[int, ...],
    tensors: Tensors,
    gradient: torch.Tensor,
    only: Sequence[str] = ("cudnn", "fa2", "fa3"),
) -> list[Contender]:
    """cuDNN and FlashAttention-2 through torch, and FlashAttention-3 where its package can be imported."""
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
    found = []
    for name, backend in backends.items():
        if name not in only:
            continue
        try:
            found.append(library_backward(name, backend, lengths, tensors, gradient))
        except RuntimeError as error:
            print(f"{name} does not run: {str(error).strip().splitlines()[0][:200]}", flush=True)
    if "fa3" in only and flash3.refusal(gradient.device, gradient.dtype, HEAD_DIM) is None:
        counts, scale = np.asarray(lengths), HEAD_DIM**-0.5
        segments = Segments.build(counts, counts, gradient.device)
        out, lse = flash3.forward(*tensors, segments, True, scale)
        run = functools.partial(flash3.backward, gradient, *tensors, out, lse, segments, True, scale, False)
        found.append(Contender("fa3", run, backward_flops(lengths)))
    return found


def through_autograd(placement: Placement, tensors: Tensors, gradient: torch.Tensor) -> Callable[[], object]:
    """Forward and backward of one rank through the operators and autograd, as training calls them."""
    shards = to_device(placement.shards(0), gradient.device)
    site = fused_backend.site(shards, (QUERY_HEADS, KV_HEADS, HEAD_DIM), gradients=True)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def run() -> object:
        out, _ = torch.ops.megaring.forward(*leaves, site.number, HEAD_DIM**-0.5)
        return torch.autograd.grad(out, leaves, gradient)

    return run
