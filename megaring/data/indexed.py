"""Megatron-Core's indexed corpus: ``PREFIX.bin`` holds token ids, ``PREFIX.idx`` says where each document lies.

Layout of the index, little-endian: magic (9 bytes), version (uint64), dtype code (uint8), number of sequences (uint64),
number of document bounds (uint64), sequence lengths (int32, tokens), sequence pointers (int64, bytes into ``.bin``),
document bounds (int64, sequence numbers; the first is 0, the last is the number of sequences). A document is the run of
sequences between two bounds; writers put one or several (sentences) into each. Sequences lie in ``.bin`` one after the
other, so a document is one contiguous run of tokens.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from megaring.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
HEADER = struct.Struct("<9sQBQQ")
MAX_DOCUMENT = 2**31 - 1  # lengths are int32
REBUILD = "make the corpus again with scripts/prepare_corpus.py, or copy both of its files again"


class CorpusError(UserError):
    """A corpus that cannot be trained on; the message names the file and the remedy."""


def corpus_paths(prefix: str | Path) -> tuple[Path, Path]:
    """``PREFIX.bin`` and ``PREFIX.idx``. Raises CorpusError for a prefix that is empty or ends in a separator."""
    if not str(prefix) or str(prefix).endswith(("/", os.sep)):
        raise CorpusError(f"a corpus's prefix ends with a name, unlike {str(prefix)!r}: give for example corpus/mine")
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class IndexedCorpus:
    """A memory-mapped corpus; documents without tokens are left out and counted.

    documents: ``[n]`` int64, number of each document in the index (what messages name).
    lengths: ``[n]`` int64, its tokens. num_tokens: their sum. num_empty: documents left out. dtype: of the ids on disk.

    Opening checks all that is cheap (everything but the ids) and raises CorpusError for: a missing file; another magic,
    version or dtype than Megatron's integers; an index that is shorter or longer than its counts say; lengths, pointers
    and document bounds that do not fit together; a ``.bin`` of another size than the index says; no tokens at all.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = corpus_paths(prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise CorpusError(
                    f"{path} does not exist: a corpus is named without .bin or .idx, and has both files; "
                    "scripts/prepare_corpus.py makes them"
                )
        self.dtype, sequence_lengths, bounds = _read_index(self.idx_path)
        tokens_before = np.concatenate([[0], np.cumsum(sequence_lengths, dtype=np.int64)])
        said, found = int(tokens_before[-1]) * self.dtype.itemsize, self.bin_path.stat().st_size
        if said != found:
            raise CorpusError(
                f"{self.bin_path} has {found:,} bytes, {self.idx_path} says {said:,}: the file was cut or belongs to "
                f"another index; {REBUILD}"
            )
        starts = tokens_before[bounds]
        lengths = np.diff(starts)
        self.documents = np.flatnonzero(lengths)
        self.lengths = lengths[self.documents]
        self._starts = starts[self.documents]
        self.num_tokens = int(tokens_before[-1])
        self.num_empty = len(lengths) - len(self.documents)
        if not len(self.documents):
            raise CorpusError(f"{self.idx_path} has {len(lengths):,} documents and no tokens: the corpus is empty")
        if self.lengths.max() > MAX_DOCUMENT:
            longest = int(self.lengths.argmax())
            raise CorpusError(
                f"{self.idx_path}: document {self.documents[longest]} has {self.lengths[longest]:,} tokens; "
                f"the most is {MAX_DOCUMENT:,}"
            )
        self._ids = np.memmap(self.bin_path, dtype=self.dtype, mode="r").view(np.ndarray)

    def __len__(self) -> int:
        return len(self.documents)

    def tokens(self, index: int, first: int = 0, last: int | None = None) -> np.ndarray:
        """Ids at positions ``[first, last)`` of document ``documents[index]``; a view that is read when used."""
        start, length = int(self._starts[index]), int(self.lengths[index])
        last = length if last is None else last
        if not 0 <= first <= last <= length:
            raise IndexError(f"[{first}, {last}) is not within the {length} tokens of document {self.documents[index]}")
        return self._ids[start + first : start + last]


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """The ids' dtype, sequence lengths ``[s]`` int32 and document bounds ``[d + 1]`` int64 of a checked index."""

    def refuse(why: str) -> CorpusError:
        return CorpusError(f"{path} is corrupt: {why}; {REBUILD}")

    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC:
        raise refuse("it does not begin as an index of Megatron does")
    if len(header) < HEADER.size:
        raise refuse(f"it ends after {size} bytes, within the header of {HEADER.size}")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if version != VERSION:
        raise CorpusError(f"{path} has index version {version}; only version {VERSION} can be read")
    if code not in DTYPES:
        raise refuse(f"dtype code {code} is none of {', '.join(map(str, DTYPES))}")
    dtype = np.dtype(DTYPES[code])
    if dtype.kind == "f":
        raise CorpusError(f"{path} says that ids are {dtype.name}; token ids are integers")
    said = HEADER.size + num_sequences * 12 + num_bounds * 8
    if size < said:
        raise refuse(
            f"it has {size:,} bytes; {num_sequences:,} sequences and {num_bounds:,} document bounds take {said:,}"
        )
    if num_sequences and size == said + num_sequences:
        raise CorpusError(f"{path} has a mode per sequence; multimodal corpora are not supported")
    if size > said:
        raise refuse(f"it has {size - said:,} bytes more than its counts say")
    raw = np.memmap(path, dtype=np.uint8, mode="r", offset=0)
    at_pointers = HEADER.size + num_sequences * 4
    at_bounds = at_pointers + num_sequences * 8
    lengths = np.frombuffer(raw, "<i4", num_sequences, HEADER.size)
    pointers = np.frombuffer(raw, "<i8", num_sequences, at_pointers)
    bounds = np.frombuffer(raw, "<i8", num_bounds, at_bounds)
    if (lengths < 0).any():
        bad = int(np.argmax(lengths < 0))
        raise refuse(f"sequence {bad} has {int(lengths[bad])} tokens")
    expected = (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
    if (pointers != expected).any():
        bad = int(np.argmax(pointers != expected))
        raise refuse(f"sequence {bad} points at byte {pointers[bad]}; the ones before it end at {expected[bad]}")
    if not num_bounds or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise refuse(f"its document bounds do not rise from 0 to its {num_sequences:,} sequences")
    return dtype, lengths, bounds


class IndexedWriter:
    """Writes a corpus under temporary names; ``commit`` gives it its own. One document is one sequence.

    Use it as a context manager: leaving it without ``commit`` removes what was written. The index gets its name last,
    so a run killed at any moment leaves either no corpus of that name or a whole one.
    """

    def __init__(self, prefix: str | Path, vocab_size: int):
        self.bin_path, self.idx_path = corpus_paths(prefix)
        code = 8 if vocab_size < 65500 else 4  # uint16 or int32, where Megatron draws the line too
        self.vocab_size, self.largest_id = vocab_size, -1
        self._code, self._dtype = code, np.dtype(DTYPES[code])
        self._lengths = array("i")
        self._partial = {path: path.with_name(path.name + ".partial") for path in (self.bin_path, self.idx_path)}
        self.bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._partial[self.bin_path].open("wb")

    def add(self, ids: np.ndarray) -> None:
        """Append one document: ``ids``, ``[n]`` integers below the vocabulary size with n >= 1, else ValueError."""
        if not 1 <= len(ids) <= MAX_DOCUMENT:
            raise ValueError(f"a document has {len(ids)} tokens; it must have 1 to {MAX_DOCUMENT:,}")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"ids from {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab_size} ids")
        self.largest_id = max(self.largest_id, int(ids.max()))
        self._bin.write(np.ascontiguousarray(ids, dtype=self._dtype).tobytes())
        self._lengths.append(len(ids))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document written so far: ``[n]`` int32."""
        return np.array(self._lengths, dtype="<i4")

    def commit(self, companions: Mapping[Path, str] | None = None) -> None:
        """Write the index, flush both files to disk and give them their names; an older corpus is replaced.

        companions: small text files to write beside the corpus, whole before the index has its name.
        """
        lengths = self.lengths
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._dtype.itemsize
        with self._partial[self.idx_path].open("wb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(lengths) + 1))
            idx.write(lengths.tobytes())
            idx.write(pointers.astype("<i8").tobytes())
            idx.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
            idx.flush()
            os.fsync(idx.fileno())
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        self.idx_path.unlink(missing_ok=True)
        self._partial[self.bin_path].replace(self.bin_path)
        for path, text in (companions or {}).items():
            path.write_text(text)
        self._partial[self.idx_path].replace(self.idx_path)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._bin.close()
        for partial in self._partial.values():
            partial.unlink(missing_ok=True)
