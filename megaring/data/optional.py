"""Packages that only preparing a corpus needs."""

from __future__ import annotations

import importlib
from types import ModuleType

from megaring.errors import UserError


def need(package: str, purpose: str) -> ModuleType:
    """Import ``package``, or raise UserError that says what it is needed for and how to get it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(f"{purpose} needs the package {package!r}: pip install 'megaring[train]'") from error
