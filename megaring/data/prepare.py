"""Text to a corpus: tokenise documents, set some aside, write ``.bin``, ``.idx`` and the record."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path

import numpy as np

from megaring.data.indexed import CorpusError, IndexedWriter, corpus_paths
from megaring.data.inputs import Document, describe_skipped, find_sources, read_documents
from megaring.data.optional import need
from megaring.data.record import CorpusRecord, record_path
from megaring.data.tokenizers import Tokenizer, load_tokenizer

BATCH = 64  # documents that go to a worker at once


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare and how. inputs, extensions, exclude: see ``find_sources``. json_key: see ``read_documents``.

    tokenizer, eod_token: see ``load_tokenizer``. append_eod: end each document with the end-of-document id.
    valid_fraction: share of the documents that goes to ``PREFIX_valid``, chosen by ``seed`` and content, so that a text
    is always on the same side, wherever it occurs. workers: processes that tokenise; the corpus does not depend on
    their number.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    extensions: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    json_key: str = "text"
    tokenizer: str = "byte"
    eod_token: str | None = None
    append_eod: bool = False
    valid_fraction: float = 0.0
    seed: int = 0
    workers: int = 1
    overwrite: bool = False


@dataclass(frozen=True)
class Prepared:
    """What was written. lengths: ``[documents]`` int32, tokens of each. undecodable: names of skipped documents."""

    prefix: str
    record: CorpusRecord
    lengths: np.ndarray
    undecodable: tuple[str, ...]

    def describe(self) -> str:
        """A few lines for a person."""
        record = self.record
        percentiles = np.percentile(self.lengths, (1, 25, 50, 75, 90, 99, 100), method="nearest")
        named = ", ".join(self.undecodable[:5]) + (", ..." if len(self.undecodable) > 5 else "")
        lines = [
            f"{self.prefix}.bin, .idx, .json",
            f"  documents      {record.documents:,} ({record.empty_documents:,} empty ones dropped)",
            f"  tokens         {record.tokens:,}",
            "  length         "
            + ", ".join(
                f"{name} {int(value):,}"
                for name, value in zip(("1%", "25%", "50%", "75%", "90%", "99%", "max"), percentiles, strict=True)
            ),
            f"  tokenizer      {record.tokenizer}, {record.vocab_size:,} ids, largest used {record.largest_id:,}",
        ]
        if self.undecodable:
            lines.append(f"  not UTF-8      {len(self.undecodable):,} skipped: {named}")
        if record.skipped_files:
            lines.append(f"  other files    {describe_skipped(record.skipped_files)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Encoded:
    """A document's ids, or None when it is not UTF-8 text; ``share`` in [0, 1) decides on its side."""

    name: str
    ids: np.ndarray | None
    share: float = 0.0


@dataclass
class _Part:
    """A corpus being written, and what was left out of it."""

    prefix: str
    writer: IndexedWriter
    skipped_files: Mapping[str, int] = field(default_factory=dict)
    empty: int = 0
    undecodable: list[str] = field(default_factory=list)

    def commit(self, tokenizer: Tokenizer, append_eod: bool) -> Prepared:
        lengths = self.writer.lengths
        record = CorpusRecord(
            largest_id=self.writer.largest_id,
            documents=len(lengths),
            tokens=int(lengths.sum(dtype=np.int64)),
            longest=int(lengths.max()),
            empty_documents=self.empty,
            undecodable_documents=len(self.undecodable),
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            append_eod=append_eod,
            skipped_files=self.skipped_files,
        )
        self.writer.commit({record_path(self.prefix): record.to_json()})
        return Prepared(self.prefix, record, lengths, tuple(self.undecodable))


def prepare(config: PrepareConfig) -> list[Prepared]:
    """Write ``output_prefix`` and, with a ``valid_fraction``, ``output_prefix_valid``, all or nothing.

    Documents come in the order of ``find_sources`` and, inside a file, of its rows. Empty ones and those that are not
    UTF-8 are left out and counted, as are the files of folders that have other extensions (in the record of the first
    corpus).
    Raises CorpusError for inputs that cannot be read, an output that exists (without ``overwrite``), ``append_eod``
    without such an id, a setting that would do nothing, and a corpus that would be empty.
    """
    _refuse_idle(config)
    if not 0 <= config.valid_fraction < 1:
        raise CorpusError(f"--valid-fraction is {config.valid_fraction}; it must be at least 0 and below 1")
    prefixes = [config.output_prefix] + ([f"{config.output_prefix}_valid"] if config.valid_fraction else [])
    for prefix in prefixes:
        for path in corpus_paths(prefix):
            if path.exists() and not config.overwrite:
                raise CorpusError(f"{path} exists; choose another --output-prefix or give --overwrite")
    tokenizer = load_tokenizer(config.tokenizer, config.eod_token)
    if config.append_eod and tokenizer.eod_id is None:
        raise CorpusError(
            f"tokenizer {tokenizer.name} names no end-of-document token; give --eod-token with --append-eod"
        )
    found = find_sources(config.inputs, config.extensions, config.exclude)
    if config.json_key != PrepareConfig.json_key and all(source.kind == "text" for source in found.sources):
        raise CorpusError("--json-key has no effect: all inputs are text files; leave it out, or check --extensions")
    total = len(found.sources) if all(source.kind == "text" for source in found.sources) else None
    documents = _with_progress(read_documents(found.sources, config.json_key), total)
    with ExitStack() as stack:
        parts = [_Part(p, stack.enter_context(IndexedWriter(p, tokenizer.vocab_size))) for p in prefixes]
        parts[0].skipped_files = found.skipped
        ending = np.asarray([tokenizer.eod_id] if config.append_eod else [], dtype=np.int64)
        for encoded in _encode_all(documents, config):
            if encoded.ids is None:
                parts[0].undecodable.append(encoded.name)
            elif not len(encoded.ids):
                parts[0].empty += 1
            else:
                part = parts[-1] if encoded.share < config.valid_fraction else parts[0]
                part.writer.add(np.concatenate([encoded.ids, ending]))
        for part in parts:
            if not len(part.writer.lengths):
                raise CorpusError(_why_empty(part, parts, config))
        # The training corpus comes last: where it exists, everything does.
        return [part.commit(tokenizer, config.append_eod) for part in reversed(parts)][::-1]


def _refuse_idle(config: PrepareConfig) -> None:
    """Raise CorpusError for a setting that does nothing beside the others."""
    if config.seed != PrepareConfig.seed and not config.valid_fraction:
        raise CorpusError("--seed has no effect without --valid-fraction: give that as well, or leave it out")
    if all(Path(item).is_file() for item in config.inputs):
        for name in ("extensions", "exclude"):
            if getattr(config, name):
                raise CorpusError(f"--{name} has no effect: it chooses among files of folders, and no --input is one")


def _why_empty(part: _Part, parts: list[_Part], config: PrepareConfig) -> str:
    written = sum(len(other.writer.lengths) for other in parts)
    if written:
        return (
            f"{part.prefix} would be empty: --valid-fraction {config.valid_fraction} left none of {written} documents "
            "for it; choose another fraction or --seed"
        )
    return (
        f"no text in {', '.join(config.inputs)}: {parts[0].empty} documents are empty and {len(parts[0].undecodable)} "
        "are not UTF-8; check --input, --extensions and --json-key"
    )


def _with_progress(documents: Iterable[Document], total: int | None) -> Iterable[Document]:
    if not sys.stderr.isatty():
        return documents
    return need("tqdm", "the progress bar").tqdm(documents, total=total, unit=" documents", dynamic_ncols=True)


def _encode_all(documents: Iterable[Document], config: PrepareConfig) -> Iterator[_Encoded]:
    """Encoded documents in order, by ``config.workers`` processes that are never more than a few batches ahead."""
    settings = (config.tokenizer, config.eod_token, config.seed)
    batches = batched(documents, BATCH)
    if config.workers == 1:
        encoder = _Encoder(*settings)
        for batch in batches:
            yield from encoder.encode(batch)
        return
    # Not forked: threads of the libraries that read inputs would not survive it.
    context = multiprocessing.get_context("spawn")
    waiting: deque[Future[list[_Encoded]]] = deque()
    with ProcessPoolExecutor(config.workers, context, initializer=_start_worker, initargs=settings) as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(_work, batch))
                if len(waiting) > 2 * config.workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise CorpusError(
                "a tokenising process was killed, perhaps for want of memory; use fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _Encoder:
    """A tokenizer and the choice of a document's side."""

    def __init__(self, tokenizer: str, eod_token: str | None, seed: int):
        self._tokenizer = load_tokenizer(tokenizer, eod_token)
        self._key = str(seed).encode()

    def encode(self, documents: Sequence[Document]) -> list[_Encoded]:
        return [self._encode(document) for document in documents]

    def _encode(self, document: Document) -> _Encoded:
        try:
            text = document.read()
            content = text.encode()
        except UnicodeError:  # not UTF-8, or half of a surrogate pair in JSON
            return _Encoded(document.name, None)
        digest = hashlib.blake2b(content, digest_size=8, key=self._key).digest()
        # 53 bits, so that a double holds the share exactly and it stays below 1.
        return _Encoded(document.name, self._tokenizer.encode(text), (int.from_bytes(digest, "little") >> 11) / 2**53)


_encoder: _Encoder | None = None  # of a worker process


def _start_worker(*settings: object) -> None:
    global _encoder
    _encoder = _Encoder(*settings)


def _work(batch: tuple[Document, ...]) -> list[_Encoded]:
    return _encoder.encode(batch)
