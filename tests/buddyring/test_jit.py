"""Compiled kernels: where their code is kept, and what happens where it can't be."""

import numba
import numpy as np

from buddyring.search.kernels import jit, sort


def double(x):
    """Twice ``x``."""
    return 2 * x


def test_cached_code_is_named_after_all_sources():
    # code of another version of any kernel file is never loaded, also not for a kernel whose own file is the same
    assert jit.SOURCES in sort.ascending._cache._cache_file._index_name
    assert jit.SOURCES in sort.ascending._cache._cache_file._data_name_pattern
    sort.ascending(np.array([2.0, 1.0]))
    assert sort.ascending.stats.cache_path


def test_works_where_no_cache_folder_can_be_written(monkeypatch):
    njit = numba.njit

    def refuse(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(jit.numba, "njit", refuse)
    compiled = jit.kernel(double)
    assert compiled(21) == 42
    assert compiled._cache.cache_path is None
