"""Text to token ids: bytes, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import numpy as np

from megaring.data.indexed import CorpusError
from megaring.data.optional import need


class Tokenizer(Protocol):
    """name: what the record keeps. vocab_size: above all ids. eod_id: ends a document, if there is such an id."""

    name: str
    vocab_size: int
    eod_id: int | None

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, ``[n]`` integers, without special tokens of the tokenizer's own around them."""


class ByteTokenizer:
    """The UTF-8 bytes of the text are its ids 0 to 255; 256 ends a document."""

    name = "byte"
    vocab_size = 257
    eod_id = 256

    def encode(self, text: str) -> np.ndarray:
        """One id per byte, ``[n]`` uint8."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids; the end of a document has none, and cut characters come out as U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, with its truncation and padding switched off.

    The end-of-document token is ``eod_token``, else the ``eos_token`` of a ``tokenizer_config.json`` beside the file.
    Raises CorpusError for a file that is no tokenizer and for an end-of-document token that it does not have.
    """

    def __init__(self, path: str | Path, eod_token: str | None = None):
        path = Path(path)
        if not path.is_file():
            raise CorpusError(f"--tokenizer {path} does not exist; give 'byte' or the path of a tokenizer.json")
        library = need("tokenizers", "a tokenizer.json")
        try:
            self._backend = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CorpusError(f"{path} is not a tokenizer.json that can be read: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise CorpusError(f"{path} has an empty vocabulary")
        self.name = f"{path.parent.name}/{path.name}" if path.name == "tokenizer.json" else path.name
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps, so their number would be too few
        self.eod_id = None
        eod_token = eod_token if eod_token is not None else _eos_token(path.with_name("tokenizer_config.json"))
        if eod_token is not None:
            if eod_token not in vocabulary:
                raise CorpusError(
                    f"{path} has no token {eod_token!r} to end documents with; name another by --eod-token"
                )
            self.eod_id = vocabulary[eod_token]

    def encode(self, text: str) -> np.ndarray:
        """Ids ``[n]`` int64."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids; special tokens have none, and cut characters come out as U+FFFD."""
        return self._backend.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)


def _eos_token(config: Path) -> str | None:
    """``eos_token`` of a tokenizer's configuration file, which gives it as a string or an object with its content."""
    if not config.is_file():
        return None
    try:
        token = json.loads(config.read_text()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise CorpusError(
            f"{config} is not a tokenizer's configuration: {error!r}; mend it or give --eod-token"
        ) from error
    return token.get("content") if isinstance(token, dict) else token


def load_tokenizer(name: str, eod_token: str | None = None) -> Tokenizer:
    """``byte`` or the path of a ``tokenizer.json`` (or of the folder that holds it)."""
    if name == "byte":
        if eod_token is not None:
            raise CorpusError("--eod-token is for tokenizer.json files; the byte tokenizer ends documents with id 256")
        return ByteTokenizer()
    path = Path(name)
    return HuggingFaceTokenizer(path / "tokenizer.json" if path.is_dir() else path, eod_token)
