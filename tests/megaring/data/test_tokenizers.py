"""The byte tokenizer and tokenizer.json files made on the fly."""

import json

import numpy as np
import pytest

from megaring.data.indexed import CorpusError
from megaring.data.tokenizers import ByteTokenizer, load_tokenizer

WORDS = {"<unk>": 0, "one": 1, "two": 2, "three": 3, "<s>": 7}  # ids with a gap


@pytest.fixture
def folder(tmp_path):
    """A word tokenizer with everything that could change a document: a start token, truncation and padding."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 7)])
    made.add_special_tokens(["<s>", "<end>"])
    made.enable_truncation(3)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🌍", "tabs\tand\r\nlines\n", "\x00"])
def test_bytes(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode(np.append(tokenizer.encode(text), 256)) == text


def test_byte_vocabulary():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod_id) == ("byte", 257, 256)
    assert len(tokenizer.encode("")) == 0
    with pytest.raises(CorpusError, match=r"--eod-token is for tokenizer\.json files"):
        load_tokenizer("byte", "<end>")


def test_tokenizer_json_encodes_whole_documents_and_nothing_else(folder):
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    assert tokenizer.encode("one two three two one six").tolist() == [1, 2, 3, 2, 1, 0]
    assert tokenizer.encode("one").tolist() == [1]


def test_vocabulary_covers_ids_beyond_a_gap(folder):
    tokenizer = load_tokenizer(str(folder))
    # Six entries; the library numbers <end> by their count, inside the gap below <s>.
    assert tokenizer.encode("<s> <end>").tolist() == [7, 5]
    assert tokenizer.vocab_size == 8
    assert tokenizer.name == f"{folder.name}/tokenizer.json"


def test_end_of_document(folder):
    assert load_tokenizer(str(folder)).eod_id is None
    end = int(load_tokenizer(str(folder)).encode("<end>")[0])
    assert load_tokenizer(str(folder), "<end>").eod_id == end
    for value in ("<end>", {"content": "<end>", "lstrip": False}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        assert load_tokenizer(str(folder)).eod_id == end
    assert load_tokenizer(str(folder), "three").eod_id == 3
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert load_tokenizer(str(folder)).eod_id is None


def test_end_of_document_that_is_no_token(folder):
    with pytest.raises(CorpusError, match="has no token '<eos>' to end documents"):
        load_tokenizer(str(folder), "<eos>")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CorpusError, match=r"tokenizer_config\.json is not a tokenizer's configuration"):
        load_tokenizer(str(folder))


def test_no_such_tokenizer(tmp_path):
    with pytest.raises(CorpusError, match=r"--tokenizer gpt2 does not exist; give 'byte' or the path"):
        load_tokenizer("gpt2")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"tokenizer\.json is not a tokenizer\.json that can be read"):
        load_tokenizer(str(tmp_path))
