"""How the search's kernels are compiled: once per machine, cached on disk where that is possible."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numba
from numba.core.caching import IndexDataCacheFile


def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


SOURCES = _sources()


def kernel(function: Callable) -> Callable:
    """Compile ``function`` with Numba on its first call, without the GIL.

    Compiled code is kept beside the source, or in the user's cache folder where that is not writable; with neither,
    every process compiles for itself (some 20 seconds). Numba writes its cache files by renaming, so processes that
    start together may all compile, and all read whole files.
    """
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # Numba found no folder that it can write to
        return numba.njit(nogil=True)(function)
    # Numba looks for changes only in the file of the kernel it loads, not in the kernels it calls from other files.
    # So the names of the cached files carry the state of all sources: code of another version is never read.
    cache = compiled._cache
    cache._cache_file = IndexDataCacheFile(cache._cache_path, f"{cache._impl.filename_base}.{SOURCES}", SOURCES)
    return compiled
