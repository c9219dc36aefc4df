"""Fixtures that all tests share."""

import sys
from collections.abc import Iterator

import pytest
from distributed_pool import Pool

# Imported once for all workers, but only where a test module in this run has imported it anyway.
HEAVY_MODULES = ("buddyring.search", "megatron.core", "megaring.megatron.step", "megaring.megatron.pretrain")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes for distributed cases: ``pool.run(world_size, fn, *args, timeout=60)``; see distributed_pool.py."""
    with Pool(preload=[name for name in HEAVY_MODULES if name in sys.modules]) as made:
        yield made
