"""The record beside an index: what a training run wants to know without reading the whole corpus."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from megaring.data.indexed import REBUILD, CorpusError, IndexedCorpus


@dataclass(frozen=True)
class CorpusRecord:
    """Counts and vocabulary of a prepared corpus, kept as ``PREFIX.json``.

    largest_id: the largest token id that occurs. documents, tokens: what the index holds (end-of-document tokens
    included). longest: tokens of the longest document. empty_documents: dropped, they had no text.
    undecodable_documents: skipped, they were not UTF-8 text. tokenizer: its name or file name. vocab_size: ids it can
    give, all below this. eod_id: its end-of-document id, if it has one. append_eod: whether documents end with it.
    skipped_files: files of input folders that were left out for their extension, counted by it.
    """

    largest_id: int
    documents: int
    tokens: int
    longest: int
    empty_documents: int
    undecodable_documents: int
    tokenizer: str
    vocab_size: int
    eod_id: int | None
    append_eod: bool
    skipped_files: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of the record file."""
        return json.dumps(asdict(self), indent=2) + "\n"


def record_path(prefix: str | Path) -> Path:
    """``PREFIX.json``."""
    return Path(f"{prefix}.json")


def read_record(corpus: IndexedCorpus) -> CorpusRecord | None:
    """The record beside ``corpus``, or None when there is none (Megatron's own tools write none).

    One that does not say which files were skipped says that none were.
    Raises CorpusError when it cannot be read or its counts are not those of the index.
    """
    path = record_path(corpus.prefix)
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
        data["skipped_files"] = dict(data.get("skipped_files", {}))
        record = CorpusRecord(**{field.name: data[field.name] for field in fields(CorpusRecord)})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorpusError(f"{path} is not a corpus record ({error!r}); {REBUILD}, or delete the record") from error
    if (record.documents, record.tokens) != (len(corpus), corpus.num_tokens):
        raise CorpusError(
            f"{path} counts {record.documents:,} documents and {record.tokens:,} tokens, {corpus.idx_path} "
            f"{len(corpus):,} and {corpus.num_tokens:,}: they do not belong together; {REBUILD}"
        )
    return record


def check_vocabulary(corpus: IndexedCorpus, record: CorpusRecord | None, vocab_size: int) -> None:
    """Raise CorpusError when the record says that ids reach beyond a model's ``vocab_size``.

    Without a record nothing is known before ids are drawn; the loader checks those.
    """
    if record is not None and record.largest_id >= vocab_size:
        raise CorpusError(
            f"{corpus.bin_path} holds token id {record.largest_id}, the model's vocabulary has {vocab_size} ids: "
            f"give --vocab-size {record.vocab_size} or more, as the corpus's tokenizer ({record.tokenizer}) has"
        )
