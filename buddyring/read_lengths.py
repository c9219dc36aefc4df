"""Sequence lengths from a file: one integer per line, JSON lines with a field, or the index of a Megatron dataset."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buddyring.lengths import MAX_LENGTH

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices
_DTYPE_CODES = range(1, 9)


class LengthsError(ValueError):
    """A file that does not give sequence lengths; the message names the file, the place and the remedy."""


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths read from ``source``: ``[n]`` int64 tokens, and how many empty documents were left out."""

    source: str
    lengths: np.ndarray
    empty: int = 0


def read_lengths(path: str, field: str | None = None) -> Lengths:
    """The lengths in ``path``; ``-`` is standard input.

    A name that ends in ``.idx`` is a Megatron index; otherwise ``field`` says JSON lines, and without it the file has
    one integer per line. Blank lines count for nothing. Raises LengthsError for anything that is not a length of at
    least 1 token, with file and line; OSError when the file cannot be read.
    """
    if path != "-" and path.endswith(".idx"):
        if field is not None:
            raise LengthsError(f"{path}: a Megatron index has no fields; leave --field out")
        return read_megatron_index(path)
    if path == "-":
        if sys.stdin is None:
            raise LengthsError("standard input is closed; give a file")
        source, lines = "standard input", sys.stdin.buffer.read().splitlines()
    else:
        index = f"{path.removesuffix('.bin')}.idx"  # of a corpus named by its prefix, as training takes it
        if (path.endswith(".bin") or not Path(path).exists()) and Path(index).is_file():
            raise LengthsError(f"{path}: the lengths of this corpus are in {index}; give that")
        source, lines = path, Path(path).read_bytes().splitlines()
    found = list(_parse(source, lines, field))
    if not found:
        raise LengthsError(f"{source}: no lengths in it; give one integer per line")
    return Lengths(source, np.asarray(found, dtype=np.int64))


def _parse(source: str, lines: Iterable[bytes], field: str | None) -> Iterable[int]:
    for number, raw in enumerate(lines, start=1):
        where = f"{source}, line {number}"
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise LengthsError(f"{where}: not text; a Megatron index must be named .idx") from None
        if not text:
            continue
        length = _from_text(where, text) if field is None else _from_json(where, text, field)
        if not 1 <= length <= MAX_LENGTH:
            raise LengthsError(f"{where}: {length} is not a length; lengths are 1 to {MAX_LENGTH} tokens")
        yield length


def _from_text(where: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        hint = "; JSON lines need --field NAME" if text.startswith("{") else "; give one integer per line"
        raise LengthsError(f"{where}: {_short(text)} is not an integer{hint}")
    if len(digits) > 20:  # far beyond any length, and Python refuses to convert thousands of digits
        raise LengthsError(f"{where}: {_short(text)} is not a length; lengths are 1 to {MAX_LENGTH} tokens")
    return int(text)


def _from_json(where: str, text: str, field: str) -> int:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # the second for thousands of nested brackets
        raise LengthsError(f"{where}: {_short(text)} is not JSON; with --field each line is one JSON object") from None
    if not isinstance(record, dict):
        raise LengthsError(f"{where}: {_short(text)} is not a JSON object")
    if field not in record:
        has = ", ".join(sorted(record)) or "no field"
        raise LengthsError(f"{where}: no field {field!r}; it has {has}")
    value = record[field]
    if isinstance(value, list):
        return len(value)
    if type(value) is not int:
        raise LengthsError(
            f"{where}: field {field!r} is {_short(json.dumps(value))}; it must be an integer or a list of token ids"
        )
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def read_megatron_index(path: str) -> Lengths:
    """Document lengths of a Megatron ``.idx`` file, in order; empty documents are left out and counted.

    Layout (little endian): 9 bytes ``MMIDIDX``, version u64 = 1, dtype code u8, number of sequences u64, number of
    document indices u64, then sequence lengths int32, byte pointers int64, document indices int64 (the first sequence
    of each document, and the end). What follows them (modes of multimodal data) is not read. A document's length is the
    sum of its sequences. Raises LengthsError for a file that contradicts itself, naming how.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or header[: len(_MAGIC)] != _MAGIC:
            raise LengthsError(f"{path}: not a Megatron index (it does not begin with MMIDIDX); make it again")
        _, version, dtype, sequences, indices = _HEADER.unpack(header)
        if version != 1:
            raise LengthsError(f"{path}: index version {version}; this reads version 1")
        if dtype not in _DTYPE_CODES:
            raise LengthsError(f"{path}: unknown dtype code {dtype}; the index is damaged, make it again")
        needed = _HEADER.size + sequences * (4 + 8) + indices * 8
        if size < needed:
            raise LengthsError(f"{path}: {size} bytes, but its header needs {needed}; it was cut short, make it again")
        lengths = np.fromfile(file, dtype="<i4", count=sequences).astype(np.int64)
        file.seek(sequences * 8, 1)
        documents = np.fromfile(file, dtype="<i8", count=indices)
    negative = np.flatnonzero(lengths < 0)
    if negative.size:
        raise LengthsError(f"{path}: sequence {negative[0]} has {lengths[negative[0]]} tokens; the index is damaged")
    if not indices or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise LengthsError(f"{path}: document indices do not run from 0 to {sequences}; the index is damaged")
    ends = np.concatenate([[0], np.cumsum(lengths)])
    totals = np.diff(ends[documents])
    if totals.max(initial=0) > MAX_LENGTH:
        raise LengthsError(f"{path}: document {totals.argmax()} has {totals.max()} tokens; the most is {MAX_LENGTH}")
    kept = totals[totals > 0]
    if not len(kept):
        raise LengthsError(f"{path}: no documents with tokens in it")
    return Lengths(path, kept, empty=len(totals) - len(kept))
