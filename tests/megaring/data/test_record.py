"""The record beside an index."""

import json
from dataclasses import replace

import pytest

from megaring.data.indexed import CorpusError
from megaring.data.record import CorpusRecord, check_vocabulary, read_record, record_path

RECORD = CorpusRecord(
    largest_id=9,
    documents=2,
    tokens=5,
    longest=3,
    empty_documents=1,
    undecodable_documents=0,
    tokenizer="byte",
    vocab_size=257,
    eod_id=256,
    append_eod=False,
    skipped_files={".pyc": 3},
)


@pytest.fixture
def corpus(make_corpus):
    corpus = make_corpus([[1, 2, 3], [4, 9]])
    record_path(corpus.prefix).write_text(RECORD.to_json())
    return corpus


def test_round_trip(corpus):
    assert read_record(corpus) == RECORD


def test_record_that_does_not_count_skipped_files(corpus):
    data = json.loads(RECORD.to_json())
    del data["skipped_files"]
    record_path(corpus.prefix).write_text(json.dumps(data))
    assert read_record(corpus) == replace(RECORD, skipped_files={})


def test_no_record(corpus):
    record_path(corpus.prefix).unlink()
    assert read_record(corpus) is None
    check_vocabulary(corpus, None, 1)


@pytest.mark.parametrize("field", ["documents", "tokens"])
def test_record_of_another_index(corpus, field):
    data = json.loads(RECORD.to_json())
    data[field] += 1
    record_path(corpus.prefix).write_text(json.dumps(data))
    with pytest.raises(CorpusError, match="they do not belong together"):
        read_record(corpus)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"documents": 2}', '{"skipped_files": 2}'])
def test_broken_record(corpus, text):
    record_path(corpus.prefix).write_text(text)
    with pytest.raises(CorpusError, match=r"corpus\.json is not a corpus record"):
        read_record(corpus)


def test_vocabulary(corpus):
    check_vocabulary(corpus, RECORD, 10)
    with pytest.raises(
        CorpusError, match=r"corpus\.bin holds token id 9, the model's vocabulary has 9 ids: give --voc"
    ):
        check_vocabulary(corpus, RECORD, 9)
