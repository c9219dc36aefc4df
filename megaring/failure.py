"""How a run that fails under torchrun ends: one clear message, last on the screen, and every rank's non-zero exit."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import NoReturn

from megaring.errors import UserError

# What a rank sees when a peer has gone: not a cause, so it must not displace the cause in torchrun's summary.
_PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket timeout",
    "remote process",
)
_LATER = 3600  # seconds


def fail(program: str, error: BaseException, *, quiet: bool = False) -> NoReturn:
    """Report ``error`` and exit with code 2 for a ``UserError``, 1 otherwise.

    torchrun prints the message of the earliest error file last, so the message goes there as well (by the format that
    ``torch.distributed.elastic`` reads). ``quiet`` keeps it off this rank's own stderr, for errors that every rank has.
    """
    rank = os.environ.get("RANK")
    where = "" if rank is None else f" [rank {rank}]"
    lost_peer = not isinstance(error, UserError) and any(sign in str(error).lower() for sign in _PEER_GONE)
    if isinstance(error, UserError):
        message = f"{program}: error: {error}"
        shown = message
    elif lost_peer:
        message = f"{program}{where}: lost a peer ({str(error).splitlines()[0][:200]}); see the rank that failed first"
        shown = message
    else:
        message = f"{program}{where}: {type(error).__name__}: {error}"
        shown = "".join(traceback.format_exception(error)) + message
    if not quiet:
        print(shown, file=sys.stderr, flush=True)
    _tell_torchrun(message, time.time() + (_LATER if lost_peer else 0))
    sys.stdout.flush()
    # Not sys.exit: a rank whose peers wait in a collective must not wait for them in an exit handler.
    os._exit(2 if isinstance(error, UserError) else 1)


def _tell_torchrun(message: str, timestamp: float) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    report = {"message": {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(timestamp))}}}
    try:
        with open(path, "w") as file:
            json.dump(report, file)
    except OSError as problem:
        print(f"could not write torchrun's error file: {problem}", file=sys.stderr)
