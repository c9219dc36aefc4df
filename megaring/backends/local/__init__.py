"""Kernels for the blocks of attention that one device computes alone, fastest first, and the choice among them.

Each file holds one family of kernels, a module with

- ``NAME``;
- ``refusal(device, dtype, head_dim) -> str | None``: why it cannot run there;
- ``forward(q, k, v, segments, causal, scale) -> (out, lse)``;
- ``backward(dout, q, k, v, out, lse, segments, causal, scale, deterministic) -> (dq, dk, dv)``.

``q, out, dout: [tq, Hq, D]``; ``k, v: [tk, Hkv, D]``; ``lse: [tq, Hq]`` fp32 (fp64 for fp64), natural logarithm of the
scaled scores' sum. In each segment all its queries see all its keys, or with ``causal`` those up to their own index;
such segments have as many keys as queries. Results have the inputs' type or a wider one. ``out`` and ``lse`` given to
``backward`` may be those of a softmax over more keys than the block's, which makes its results the block's share of
the whole gradient (FlashAttention-2, section 2.3.2: only LSE and rowsum(dO * O) enter). Last dimensions have stride 1.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

FAMILIES = ("flash3", "flash2", "torch_flash", "torch_flash_cpu", "plain")

logger = logging.getLogger(__name__)


@functools.cache
def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> ModuleType:
    """The fastest family for these inputs; the first time, the log says which one and why none faster.

    Every rank of a domain must arrive at the same one, since partial gradients travel in its result type.
    """
    refusals = []
    for family in FAMILIES:
        module = importlib.import_module(f"{__name__}.{family}")
        reason = module.refusal(device, dtype, head_dim)
        if reason is None:
            break
        refusals.append(f"not {module.NAME}: {reason}")
    notes = f" ({'; '.join(refusals)})" if refusals else ""
    logger.info("local attention on %s, %s, head dim %d: %s%s", device, dtype, head_dim, module.NAME, notes)
    return module
