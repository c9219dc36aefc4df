"""The schedulers by name: each takes a ``Problem`` and answers a ``Layout``."""

from __future__ import annotations

from collections.abc import Callable

from buddyring.problem import Layout, Problem
from buddyring.schedulers.local import local
from buddyring.schedulers.megatron import megatron
from buddyring.schedulers.uniform import uniform
from buddyring.schedulers.zeppelin import zeppelin


def _buddyring(problem: Problem) -> Layout:
    from buddyring.search import buddyring  # Numba takes a third of a second to import: only when it is used

    return buddyring(problem)


SCHEDULERS: dict[str, Callable[[Problem], Layout]] = {
    "buddyring": _buddyring,
    "local": local,
    "megatron": megatron,
    "uniform": uniform,
    "zeppelin": zeppelin,
}

__all__ = ["SCHEDULERS"]
