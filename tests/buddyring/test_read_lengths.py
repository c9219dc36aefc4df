import io
import struct
import sys

import numpy as np
import pytest

from buddyring.read_lengths import LengthsError, read_lengths
from megaring.data.indexed import IndexedWriter


def write(tmp_path, content, name="lengths.txt"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def index_bytes(lengths, documents, *, dtype=4, version=1, magic=b"MMIDIDX\x00\x00", sequences=None, tail=b""):
    """An index put together field by field from Megatron's layout."""
    count = len(lengths) if sequences is None else sequences
    header = magic + struct.pack("<QBQQ", version, dtype, count, len(documents))
    pointers = np.cumsum([0, *lengths])[:-1] * 4
    arrays = (np.asarray(lengths, "<i4"), pointers.astype("<i8"), np.asarray(documents, "<i8"))
    return header + b"".join(a.tobytes() for a in arrays) + tail


@pytest.mark.parametrize(
    "content", ["5\n17\n2147483647\n", "5\r\n\r\n 17 \n\n2147483647", "\ufeff5\n17\n2147483647\n", "5\n017\n2147483647"]
)
def test_text(tmp_path, content):
    assert read_lengths(write(tmp_path, content)).lengths.tolist() == [5, 17, 2147483647]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x", "'x' is not an integer; give one integer per line"),
        ("1.5", "'1.5' is not an integer"),
        ("3 4", "'3 4' is not an integer"),
        ("1_000", "'1_000' is not an integer"),
        ("٣", "is not an integer"),
        ("0", "0 is not a length; lengths are 1 to 2147483647 tokens"),
        ("-7", "-7 is not a length"),
        ("2147483648", "2147483648 is not a length"),
        ("9" * 10000, "is not a length"),
        ('{"length": 3}', "JSON lines need --field NAME"),
    ],
)
def test_a_bad_line_of_text_is_named(tmp_path, line, words):
    path = write(tmp_path, f"5\n\n{line}\n6\n")
    with pytest.raises(LengthsError) as error:
        read_lengths(path)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert words in str(error.value)
    assert len(str(error.value)) < len(path) + 150


def test_bytes_that_are_not_text(tmp_path):
    with pytest.raises(LengthsError, match=r"line 2: not text; a Megatron index must be named \.idx"):
        read_lengths(write(tmp_path, b"5\n\xff\xfe\n"))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_nothing_in_it(tmp_path, content):
    with pytest.raises(LengthsError, match="no lengths in it"):
        read_lengths(write(tmp_path, content))


def test_json_lines_take_a_length_or_count_token_ids(tmp_path):
    path = write(tmp_path, '{"n": 7, "text": "x"}\n\n{"n": [5, 5, 5]}\n')
    assert read_lengths(path, field="n").lengths.tolist() == [7, 3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"m": 1, "a": 2}', "no field 'n'; it has a, m"),
        ("{}", "no field 'n'; it has no field"),
        ('{"n": "text"}', "must be an integer or a list of token ids"),
        ('{"n": 3.0}', "must be an integer"),
        ('{"n": true}', "must be an integer"),
        ('{"n": null}', "must be an integer"),
        ('{"n": NaN}', "must be an integer"),
        ('{"n": []}', "0 is not a length"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, words):
    path = write(tmp_path, f'{{"n": 1}}\n{line}\n')
    with pytest.raises(LengthsError) as error:
        read_lengths(path, field="n")
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert words in str(error.value)


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"3\n4\n")))
    found = read_lengths("-")
    assert found.lengths.tolist() == [3, 4] and found.source == "standard input"


def test_an_index_of_the_corpus_writer(tmp_path):
    with IndexedWriter(tmp_path / "corpus", vocab_size=257) as writer:
        for length in (3, 1, 70000):
            writer.add(np.zeros(length, dtype=np.int64))
        writer.commit()
    found = read_lengths(str(tmp_path / "corpus.idx"))
    assert found.lengths.tolist() == [3, 1, 70000] and found.empty == 0


def test_documents_of_an_index_are_sums_of_sequences_and_empty_ones_are_counted(tmp_path):
    content = index_bytes([3, 0, 4, 5, 0], [0, 1, 2, 4, 4, 5], tail=b"\x00" * 5)
    found = read_lengths(write(tmp_path, content, "x.idx"))
    assert found.lengths.tolist() == [3, 9]
    assert found.empty == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"5\n6\n", "not a Megatron index"),
        (b"", "not a Megatron index"),
        (b"MMIDIDX\x00\x00\x01", "not a Megatron index"),
        (index_bytes([3], [0, 1], magic=b"MMIDXXX\x00\x00"), "not a Megatron index"),
        (index_bytes([3], [0, 1], version=2), "index version 2"),
        (index_bytes([3], [0, 1], dtype=9), "unknown dtype code 9"),
        (index_bytes([3], [0, 1])[:-1], "cut short"),
        (index_bytes([3], [0, 1], sequences=2**60), "cut short"),
        (index_bytes([3, -1], [0, 1, 2]), "sequence 1 has -1 tokens"),
        (index_bytes([3, 4], [0, 1]), "do not run from 0 to 2"),
        (index_bytes([3, 4], [1, 2]), "do not run from 0 to 2"),
        (index_bytes([3, 4, 5], [0, 2, 1, 3]), "do not run from 0 to 3"),
        (index_bytes([3, 4], []), "do not run from 0 to 2"),
        (index_bytes([0], [0, 1]), "no documents with tokens"),
        (index_bytes([2**31 - 1, 1], [0, 2]), "document 0 has 2147483648 tokens"),
    ],
)
def test_an_index_that_contradicts_itself(tmp_path, content, words):
    path = write(tmp_path, content, "x.idx")
    with pytest.raises(LengthsError) as error:
        read_lengths(path)
    assert str(error.value).startswith(f"{path}: ")
    assert words in str(error.value)


def test_an_index_has_no_fields(tmp_path):
    with pytest.raises(LengthsError, match="has no fields"):
        read_lengths(write(tmp_path, index_bytes([3], [0, 1]), "x.idx"), field="n")


@pytest.mark.parametrize("given", ["corpus", "corpus.bin"])
def test_a_corpus_named_by_its_prefix_or_its_tokens_is_told_its_index(tmp_path, given):
    write(tmp_path, index_bytes([3], [0, 1]), "corpus.idx")
    (tmp_path / "corpus.bin").write_bytes(b"\x01\x02\x03")
    with pytest.raises(LengthsError, match=r"corpus\.idx; give that"):
        read_lengths(str(tmp_path / given))
