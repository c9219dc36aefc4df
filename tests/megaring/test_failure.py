import json
import subprocess
import sys

import pytest

CODE = """
import sys
from megaring.errors import UserError
from megaring.failure import fail
try:
    raise {error}
except Exception as error:
    fail("prog", error, quiet={quiet})
"""


def run(error, tmp_path, quiet=False):
    report = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(error=error, quiet=quiet)],
        env={"TORCHELASTIC_ERROR_FILE": str(report), "RANK": "3"},
        capture_output=True,
        text=True,
    )
    message = json.loads(report.read_text())["message"]
    return done, message["message"], int(message["extraInfo"]["timestamp"])


def test_a_user_error_is_one_line_and_exit_code_2(tmp_path):
    done, message, _ = run("UserError('no corpus; make one')", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "prog: error: no corpus; make one\n"
    assert message == "prog: error: no corpus; make one"


def test_a_quiet_rank_still_tells_torchrun(tmp_path):
    done, message, _ = run("UserError('no corpus')", tmp_path, quiet=True)
    assert (done.stderr, message) == ("", "prog: error: no corpus")


def test_an_unexpected_error_shows_its_traceback_and_ends_with_the_message(tmp_path):
    done, message, _ = run("KeyError('x')", tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1] == message == "prog [rank 3]: KeyError: 'x'"


@pytest.mark.parametrize("text", ["Connection closed by peer [127.0.0.1]:1", "Broken pipe"])
def test_a_lost_peer_never_looks_like_the_first_failure(tmp_path, text):
    _, _, cause = run("KeyError('x')", tmp_path)
    done, message, later = run(f"RuntimeError({text!r})", tmp_path)
    assert later > cause + 600
    assert "Traceback" not in done.stderr
    assert "see the rank that failed first" in message
