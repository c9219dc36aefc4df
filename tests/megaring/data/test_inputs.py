"""Finding input files and reading their documents."""

import gzip
import json
import socket

import pytest

from megaring.data.indexed import CorpusError
from megaring.data.inputs import describe_skipped, find_sources, read_documents


def texts(path, json_key="text"):
    return [document.read() for document in read_documents(find_sources([path]).sources, json_key)]


def jsonl(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tree(tmp_path):
    for name in ("b.py", "a.py", "pkg/z.py", "pkg/a.md", "pkg/test/t.py", "site-packages/x/y.py", "image.png", "c.PY"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    return tmp_path


@pytest.mark.parametrize(
    ("extensions", "exclude", "expected"),
    [
        ([], [], "a.py b.py c.PY pkg/a.md pkg/test/t.py pkg/z.py site-packages/x/y.py"),
        (["py"], ["site-packages", "test"], "a.py b.py c.PY pkg/z.py"),
        ([".py"], ["pkg/*", "*/x"], "a.py b.py c.PY"),
        ([".md", ".png"], [], "image.png pkg/a.md"),
        ([".py"], ["?.py", "*.PY"], ""),
    ],
)
def test_folders(tree, extensions, exclude, expected):
    if not expected:
        with pytest.raises(CorpusError, match=r"holds only files of other extensions: .*; --extensions says which"):
            find_sources([tree], extensions, exclude)
        return
    found = find_sources([tree], extensions, exclude).sources
    assert [source.path.relative_to(tree).as_posix() for source in found] == expected.split()
    assert {source.kind for source in found} == {"text"}


def test_named_files_are_taken_whatever_their_extension(tree):
    found = find_sources([tree / "image.png", tree / "pkg"], [".md"], ["image.png"]).sources
    assert [source.path.name for source in found] == ["image.png", "a.md"]


def test_files_of_other_extensions_are_counted(tree):
    for name in ("b.pyc", "pkg/c.PYC", "pkg/LICENSE", ".hidden", "x.tar.gz", "left.out"):
        (tree / name).write_text(name)
    found = find_sources([tree, tree / "image.png"], [".py"], ["site-packages", "test", "left.*"])
    # By count, then by name; neither what --exclude names nor what is named itself is skipped for its extension.
    assert list(found.skipped.items()) == [("(none)", 2), (".pyc", 2), (".gz", 1), (".md", 1), (".png", 1)]
    assert describe_skipped(found.skipped) == "7 skipped: 2 (none), 2 .pyc, 1 .gz, 1 .md, 1 .png"
    assert describe_skipped({**found.skipped, ".z": 1}) == "8 skipped: 2 (none), 2 .pyc, 1 .gz, 1 .md, 1 .png, ..."
    assert find_sources([tree / "image.png"]).skipped == {}


def test_nothing_but_files_of_other_extensions(tree):
    message = r"pkg holds only files of other extensions: 3 skipped: 2 \.py, 1 \.md; --extensions says which .*\.tex\)"
    with pytest.raises(CorpusError, match=message):
        find_sources([tree / "pkg"], [".tex"])
    (tree / "empty").mkdir()
    with pytest.raises(CorpusError, match=r"^no file found in .*/empty; --extensions says which"):
        find_sources([tree / "empty"])


def test_missing_input(tree):
    with pytest.raises(CorpusError, match=r"--input .*/nothing does not exist"):
        find_sources([tree, tree / "nothing"])


def test_text_is_kept_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("\r\nGrüße\u2028\x0c\n".encode())
    assert texts(tmp_path / "a.txt") == ["\r\nGrüße\u2028\x0c\n"]


@pytest.fixture
def network_calls(monkeypatch):
    """What the code under test asks of the network, which is refused. (The libraries swallow the refusal.)"""
    calls = []

    def refuse(*arguments, **_):
        calls.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return calls


def test_json_lines(tmp_path, network_calls):
    path = jsonl(
        tmp_path / "a.jsonl",
        {"text": "first\u2028line\r\n\x0b", "meta": {"a": 1}},
        "\n",
        '{"text": "raw \u2028 separator"}\n',
        {"text": "second", "meta": {"b": "x"}, "extra": [1]},
        {"text": None},
        {"text": "2024-01-01 00:00:00"},
    )
    expected = ["first\u2028line\r\n\x0b", "raw \u2028 separator", "second", "", "2024-01-01 00:00:00"]
    assert texts(path) == expected
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert texts(tmp_path / "b.jsonl.gz") == expected
    assert network_calls == []


def test_json_lines_whose_fields_change_late(tmp_path):
    rows = [{"text": "x" * 1000, "meta": {"a": i}} for i in range(12_000)] + [{"text": "last", "other": 1}]
    found = texts(jsonl(tmp_path / "a.jsonl", *rows))  # 12 MB, more than one chunk of the reader
    assert len(found) == 12_001
    assert found[-1] == "last"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("not json\n", r"a\.jsonl:2 is not JSON"),
        ("[1]\n", r"a\.jsonl:2 is a JSON list; every line must hold one JSON object"),
        (
            {"body": "x", "id": 3},
            r"a\.jsonl:2 has no field 'text' \(it has body, id\); name the one with the text by --json-key",
        ),
        ({"text": 3}, r"a\.jsonl:2: 'text' is int, not text"),
    ],
)
def test_broken_json_lines(tmp_path, row, message):
    path = jsonl(tmp_path / "a.jsonl", {"text": "fine"}, row)
    with pytest.raises(CorpusError, match=message):
        texts(path)


def test_json_lines_that_are_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "gr\xfc\xdfe"}\n')
    with pytest.raises(CorpusError, match=r"a\.jsonl cannot be read as jsonl"):
        texts(tmp_path / "a.jsonl")


def test_parquet(tmp_path, network_calls):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": [1, 2, 3], "body": ["one", None, "drei ß"]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert texts(tmp_path / "a.parquet", "body") == ["one", "", "drei ß"]
    assert network_calls == []
    with pytest.raises(CorpusError, match=r"a\.parquet has no column 'text' \(it has id, body\); name the"):
        texts(tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"a\.parquet: column 'id' holds int64, not text"):
        texts(tmp_path / "a.parquet", "id")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(CorpusError, match=r"b\.parquet cannot be read as parquet"):
        texts(tmp_path / "b.parquet")
