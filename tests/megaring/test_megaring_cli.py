"""The megaring command around its subcommands: output that cannot be written."""

import errno
import os

import pytest

from megaring import cli


@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 2, "input or output: No space left on device"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "cache"), 2, "cache: Permission denied"),
    ],
)
def test_input_and_output_that_fail_are_one_line(monkeypatch, capsys, failure, status, said):
    def fail(options):
        raise failure

    monkeypatch.setattr(cli, "_doctor", fail)
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().err == f"megaring: error: {said}\n"
