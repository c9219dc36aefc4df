"""Where documents come from: text files in folders, JSON lines, parquet."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from megaring.data.indexed import CorpusError
from megaring.data.optional import need

type Kind = Literal["text", "jsonl", "parquet"]

EXTENSIONS_SHOWN = 5  # of skipped files, in messages
NAME_THE_TEXT = "name the one with the text by --json-key"
KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet"}
TEXT_EXTENSIONS = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".ts", ".go"),
    *(".rs", ".rb", ".php", ".pl", ".lua", ".jl", ".swift", ".r", ".m", ".sql", ".sh", ".bat", ".css"),
    *(".json", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
)


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: Path
    kind: Kind


@dataclass(frozen=True)
class Found:
    """What a search of the inputs gave. sources: the files to read, in order. skipped: files of folders that were left
    out for their extension, counted by it, the most frequent first (``"none"``: names without an extension).
    """

    sources: tuple[Source, ...]
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Document:
    """One document: ``name`` for messages, and its ``text``, or the ``path`` of the text file that holds it."""

    name: str
    path: Path | None = None
    text: str | None = None

    def read(self) -> str:
        """Its text. Raises UnicodeDecodeError when the file is not UTF-8 and CorpusError when it cannot be read."""
        if self.text is not None:
            return self.text
        try:
            return self.path.read_bytes().decode()
        except OSError as error:
            raise CorpusError(
                f"{self.path} cannot be read: {error.strerror}; mend it or leave it out by --exclude"
            ) from error


def find_sources(inputs: Sequence[str | Path], extensions: Sequence[str] = (), exclude: Sequence[str] = ()) -> Found:
    """The files of ``inputs``, folders searched through, in an order that depends on their names alone.

    A file's kind follows from its name: ``.jsonl`` (also ``.jsonl.gz``), ``.parquet``, else text. extensions: what to
    take from folders (default: JSON lines, parquet and ``TEXT_EXTENSIONS``); files named in ``inputs`` are always
    taken. exclude: patterns of the shell; a file in a folder is left out when one matches its name, its path below the
    folder, or the name or path of any folder on the way; it is not counted as skipped.
    Raises CorpusError for an input that does not exist and when nothing is found; it then says what was skipped.
    """
    wanted = tuple(f".{extension.lower().lstrip('.')}" for extension in extensions) or (*KINDS, *TEXT_EXTENSIONS)
    sources: list[Source] = []
    skipped: Counter[str] = Counter()
    for item in map(Path, inputs):
        if item.is_dir():
            for name in sorted(_walk(item, exclude)):
                if name.lower().endswith(wanted):
                    sources.append(Source(item / name, _kind(name)))
                else:
                    skipped[Path(name).suffix.lower() or "(none)"] += 1
        elif item.is_file():
            sources.append(Source(item, _kind(item.name)))
        else:
            why = "is neither a file nor a folder" if item.exists() else "does not exist"
            raise CorpusError(f"--input {item} {why}")
    by_count = dict(sorted(skipped.items(), key=lambda entry: (-entry[1], entry[0])))
    if not sources:
        where = ", ".join(map(str, inputs))
        what = f"{where} holds only files of other extensions: {describe_skipped(by_count)}" if skipped else ""
        raise CorpusError(
            f"{what or f'no file found in {where}'}; --extensions says which to take from folders "
            f"(now {' '.join(wanted)}), --exclude which not"
        )
    return Found(tuple(sources), by_count)


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """``12 skipped: 9 .pyc, 3 (none)``: all files that ``Found.skipped`` counts, and the most frequent extensions."""
    named = ", ".join(f"{count:,} {extension}" for extension, count in list(skipped.items())[:EXTENSIONS_SHOWN])
    return f"{sum(skipped.values()):,} skipped: {named}" + (", ..." if len(skipped) > EXTENSIONS_SHOWN else "")


def _kind(name: str) -> Kind:
    return next((kind for ending, kind in KINDS.items() if name.lower().endswith(ending)), "text")


def _walk(folder: Path, exclude: Sequence[str]) -> Iterator[str]:
    """Paths of the files below ``folder``, relative to it, with ``/``."""
    for root, folders, files in os.walk(folder):
        base = Path(root).relative_to(folder)
        folders[:] = [name for name in folders if not _excluded(base / name, exclude)]
        for name in files:
            if not _excluded(base / name, exclude) and (Path(root) / name).is_file():
                yield (base / name).as_posix()


def _excluded(path: Path, exclude: Sequence[str]) -> bool:
    return any(fnmatchcase(path.name, pattern) or fnmatchcase(path.as_posix(), pattern) for pattern in exclude)


def read_documents(sources: Iterable[Source], json_key: str) -> Iterator[Document]:
    """The documents of ``sources`` in order: one per text file, JSON line or parquet row.

    json_key: the field or column with the text. Raises CorpusError, which names the file and the line, for a line that
    is not a JSON object, lacks the field, or has no text in it, and for a parquet file without such a column of text;
    null counts as an empty text.
    """
    for source in sources:
        if source.kind == "text":
            yield Document(str(source.path), path=source.path)
            continue
        for number, row in enumerate(_rows(source, json_key), start=1):
            name = f"{source.path}:{number}"
            if source.kind == "jsonl":
                if not row["text"].strip():
                    continue  # a blank line is no row
                row = _parse(row["text"], name)
                if json_key not in row:
                    raise CorpusError(f"{name} has no field {json_key!r} (it has {', '.join(row)}); {NAME_THE_TEXT}")
            text = row[json_key]
            if text is not None and not isinstance(text, str):
                raise CorpusError(f"{name}: {json_key!r} is {type(text).__name__}, not text; {NAME_THE_TEXT}")
            yield Document(name, text=text or "")


def _check_column(source: Source, features: Mapping[str, Any], json_key: str) -> None:
    """Raise CorpusError unless the schema of a parquet file has a column ``json_key`` of text."""
    if json_key not in features:
        raise CorpusError(f"{source.path} has no column {json_key!r} (it has {', '.join(features)}); {NAME_THE_TEXT}")
    kind = getattr(features[json_key], "dtype", type(features[json_key]).__name__)
    if kind not in ("string", "large_string"):
        raise CorpusError(f"{source.path}: column {json_key!r} holds {kind}, not text; {NAME_THE_TEXT}")


def _parse(line: str, name: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CorpusError(f"{name} is not JSON ({error}); every line must hold one JSON object") from error
    if not isinstance(row, dict):
        raise CorpusError(f"{name} is a JSON {type(row).__name__}; every line must hold one JSON object")
    return row


def _rows(source: Source, json_key: str) -> Iterator[dict[str, Any]]:
    """Rows of a JSON lines file (its lines, as ``text``) or of a parquet file, streamed by Hugging Face ``datasets``.

    JSON lines go through the reader of lines: the one of JSON guesses a schema from the first ten megabytes and fails
    where later rows have other fields. ``load_dataset`` would report each use to a server.
    """
    datasets = need("datasets", "reading JSON lines and parquet")
    try:
        if source.kind == "jsonl":
            rows = datasets.IterableDataset.from_text(str(source.path))
        else:
            rows = datasets.IterableDataset.from_parquet(str(source.path))
            _check_column(source, rows.features, json_key)
            rows = datasets.IterableDataset.from_parquet(str(source.path), columns=[json_key])
        yield from rows
    except (GeneratorExit, CorpusError):
        raise
    except Exception as error:  # pyarrow's, datasets' and the decoder's own
        raise CorpusError(f"{source.path} cannot be read as {source.kind} ({type(error).__name__}: {error})") from error
