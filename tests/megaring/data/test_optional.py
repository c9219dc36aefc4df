"""A missing package is named with its purpose and the remedy."""

import sys

import pytest

from megaring.data.optional import need
from megaring.errors import UserError


def test_present():
    assert need("json", "anything") is sys.modules["json"]


def test_missing():
    message = r"reading scrolls needs the package 'no_such_package': pip install 'megaring\[train\]'"
    with pytest.raises(UserError, match=message):
        need("no_such_package", "reading scrolls")


def test_package_whose_own_need_is_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        need("broken_package", "anything")
