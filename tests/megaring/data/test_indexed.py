"""The index format: against Megatron's own reader and writer, and every way in which a corpus can be broken."""

import struct
from pathlib import Path

import numpy as np
import pytest

from megaring.data.indexed import HEADER, CorpusError, IndexedCorpus, IndexedWriter

DOCUMENTS = [[5, 6, 7], [8], [9, 10]]  # 12 bytes of uint16


def contents(corpus):
    return [corpus.tokens(i).tolist() for i in range(len(corpus))]


def write_raw(prefix, *, code=8, lengths=(3, 1, 2), pointers=(0, 6, 8), bounds=(0, 1, 2, 3), ids=12, tail=b""):
    """An index and a ``.bin`` of ``ids`` bytes, field by field."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(bounds))
    arrays = [np.asarray(lengths, "<i4"), np.asarray(pointers, "<i8"), np.asarray(bounds, "<i8")]
    Path(f"{prefix}.idx").write_bytes(header + b"".join(a.tobytes() for a in arrays) + tail)
    Path(f"{prefix}.bin").write_bytes(np.arange(5, 5 + ids // 2, dtype="<u2").tobytes() + b"\0" * (ids % 2))


def test_round_trip(make_corpus):
    corpus = make_corpus(DOCUMENTS)
    assert contents(corpus) == DOCUMENTS
    assert corpus.lengths.tolist() == [3, 1, 2]
    assert corpus.documents.tolist() == [0, 1, 2]
    assert (len(corpus), corpus.num_tokens, corpus.num_empty, corpus.dtype) == (3, 6, 0, np.uint16)
    assert corpus.tokens(0, 1, 3).tolist() == [6, 7]


def test_written_bytes(make_corpus, tmp_path):
    make_corpus(DOCUMENTS)
    write_raw(tmp_path / "expected")
    for ending in ("idx", "bin"):
        assert (tmp_path / f"corpus.{ending}").read_bytes() == (tmp_path / f"expected.{ending}").read_bytes()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (152_000, np.int32)])
def test_dtype_follows_the_vocabulary(make_corpus, vocab_size, dtype):
    corpus = make_corpus([[0, vocab_size - 1]], vocab_size=vocab_size)
    assert corpus.dtype == dtype
    assert contents(corpus) == [[0, vocab_size - 1]]


@pytest.mark.parametrize("vocab_size", [1000, 152_000])
def test_megatron_reads_what_we_write(make_corpus, tmp_path, vocab_size):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    documents = [[1, 2, vocab_size - 1], [4], [5, 6]]
    make_corpus(documents, vocab_size=vocab_size)
    dataset = megatron.IndexedDataset(str(tmp_path / "corpus"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert dataset.sequence_lengths.tolist() == [3, 1, 2]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_we_read_what_megatron_writes(tmp_path, dtype):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    torch = pytest.importorskip("torch")
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    builder.add_document(torch.tensor([1, 2, 3, 4, 5]), [3, 2])  # two sentences of one document
    builder.end_document()  # a document without sentences
    builder.add_item(torch.tensor([6]))
    builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    corpus = IndexedCorpus(tmp_path / "theirs")
    assert contents(corpus) == [[1, 2, 3, 4, 5], [6]]
    assert corpus.documents.tolist() == [0, 2]
    assert corpus.num_empty == 1


def test_multimodal_corpora_are_refused(tmp_path):
    write_raw(tmp_path / "c", tail=b"\0\0\0")
    with pytest.raises(CorpusError, match=r"c\.idx has a mode per sequence"):
        IndexedCorpus(tmp_path / "c")


@pytest.mark.parametrize("missing", ["c.idx", "c.bin"])
def test_missing_file(tmp_path, missing):
    write_raw(tmp_path / "c")
    (tmp_path / missing).unlink()
    with pytest.raises(CorpusError, match=rf"{missing} does not exist.*without \.bin or \.idx"):
        IndexedCorpus(tmp_path / "c")


BROKEN = {
    "float ids": ({"code": 7}, "ids are float32; token ids are integers"),
    "unknown dtype": ({"code": 9}, "dtype code 9 is none of"),
    "cut .bin": ({"ids": 11}, r"c\.bin has 11 bytes, .*c\.idx says 12: the file was cut"),
    "long .bin": ({"ids": 14}, r"c\.bin has 14 bytes, .*c\.idx says 12"),
    "longer index": ({"tail": b"\0"}, "1 bytes more than its counts say"),
    "negative length": ({"lengths": (3, -1, 4)}, "sequence 1 has -1 tokens"),
    "pointer": ({"pointers": (0, 4, 8)}, "sequence 1 points at byte 4; the ones before it end at 6"),
    "length": ({"lengths": (4, 1, 1)}, "sequence 1 points at byte 6; the ones before it end at 8"),
    "bounds too far": ({"bounds": (0, 1, 2, 4)}, "do not rise from 0 to its 3 sequences"),
    "bounds too short": ({"bounds": (0, 1, 2)}, "do not rise from 0 to its 3 sequences"),
    "bounds fall": ({"bounds": (0, 2, 1, 3)}, "do not rise from 0 to its 3 sequences"),
    "bounds begin late": ({"bounds": (1, 2, 3)}, "do not rise from 0 to its 3 sequences"),
    "no bounds": ({"bounds": ()}, "do not rise from 0 to its 3 sequences"),
    "no sequences": ({"lengths": (), "pointers": (), "bounds": (0,), "ids": 0}, "the corpus is empty"),
    "no tokens": ({"lengths": (0, 0), "pointers": (0, 0), "bounds": (0, 1, 2), "ids": 0}, "the corpus is empty"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_corpus_names_file_and_fault(tmp_path, case):
    fields, message = BROKEN[case]
    write_raw(tmp_path / "c", **fields)
    with pytest.raises(CorpusError, match=message) as caught:
        IndexedCorpus(tmp_path / "c")
    assert str(tmp_path / "c") in str(caught.value)


def test_every_cut_of_an_index_is_refused(tmp_path):
    write_raw(tmp_path / "c")
    whole = (tmp_path / "c.idx").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "c.idx").write_bytes(whole[:size])
        with pytest.raises(CorpusError, match=r"c\.idx is corrupt: it .*copy both of its files again"):
            IndexedCorpus(tmp_path / "c")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "does not begin as an index of Megatron does"),
        (9, b"\x02", "index version 2; only version 1 can be read"),
        (18, b"\xff" * 8, "18,446,744,073,709,551,615 sequences"),
        (26, b"\xff" * 8, "18,446,744,073,709,551,615 document bounds"),
    ],
)
def test_broken_header(tmp_path, offset, value, message):
    write_raw(tmp_path / "c")
    whole = bytearray((tmp_path / "c.idx").read_bytes())
    whole[offset : offset + len(value)] = value
    (tmp_path / "c.idx").write_bytes(whole)
    with pytest.raises(CorpusError, match=message):
        IndexedCorpus(tmp_path / "c")


def test_header_is_34_bytes():
    assert HEADER.size == 34


def test_tokens_outside_a_document(make_corpus):
    with pytest.raises(IndexError, match=r"\[0, 4\) is not within the 3 tokens of document 0"):
        make_corpus(DOCUMENTS).tokens(0, 0, 4)


@pytest.mark.parametrize("ids", [[], [-1], [1000]])
def test_writer_refuses_what_does_not_fit(tmp_path, ids):
    with IndexedWriter(tmp_path / "c", 1000) as writer, pytest.raises(ValueError, match=r"document has 0|do not fit"):
        writer.add(np.asarray(ids, dtype=np.int64))


def test_uncommitted_corpus_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "c", 1000) as writer:
        writer.add(np.array([1]))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_commit_killed_halfway_leaves_no_corpus(make_corpus, tmp_path, monkeypatch):
    """Over an older corpus: the new ids must never be read by the old index."""
    make_corpus([[1, 2, 3]])
    renamed = []

    def replace_once(self, target, _replace=Path.replace):
        if renamed:
            raise KeyboardInterrupt
        renamed.append(target.name)
        return _replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_once)
    with pytest.raises(KeyboardInterrupt):
        make_corpus([[7, 8, 9]])
    assert renamed == ["corpus.bin"]
    with pytest.raises(CorpusError, match=r"corpus\.idx does not exist"):
        IndexedCorpus(tmp_path / "corpus")
