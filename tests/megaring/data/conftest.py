"""Small corpora."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megaring.data.indexed import IndexedCorpus, IndexedWriter


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., IndexedCorpus]:
    """``make_corpus(documents, name="corpus", vocab_size=1000)``: writes token lists and opens them."""

    def make(documents: Sequence[Sequence[int]], name: str = "corpus", vocab_size: int = 1000) -> IndexedCorpus:
        with IndexedWriter(tmp_path / name, vocab_size) as writer:
            for document in documents:
                writer.add(np.asarray(document))
            writer.commit()
        return IndexedCorpus(tmp_path / name)

    return make


@pytest.fixture
def corpus_of_lengths(make_corpus) -> Callable[..., IndexedCorpus]:
    """``corpus_of_lengths(lengths)``: ids count up through the whole corpus, modulo 1,000,000, so each is traceable."""

    def make(lengths: Sequence[int], name: str = "corpus") -> IndexedCorpus:
        ids = np.arange(sum(lengths)) % 1_000_000
        return make_corpus(np.split(ids, np.cumsum(lengths)[:-1]), name=name, vocab_size=1_000_000)

    return make
