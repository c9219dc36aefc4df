"""What becomes of documents that are longer than the longest sequence."""

import numpy as np
import pytest

from megaring.data.documents import check_plannable, make_sequences
from megaring.data.indexed import CorpusError


def contents(sequences):
    return [sequences[i].tolist() for i in range(len(sequences))]


def test_error_names_the_document_and_the_remedy(corpus_of_lengths):
    corpus = corpus_of_lengths([3, 7, 2, 9])
    message = (
        r"document 1 of .*corpus\.idx has 7 tokens, more than --seq-length 4 \(2 such documents, the longest has 9\): "
        "raise --seq-length, or choose --overlong split or truncate"
    )
    with pytest.raises(CorpusError, match=message):
        make_sequences(corpus, 4, "error")


def test_error_counts_documents_as_the_index_does(make_corpus, tmp_path):
    # Documents without tokens are left out, but the numbers in messages are those of the index.
    corpus = make_corpus([[1], [2, 3, 4]])
    corpus.documents = np.array([0, 5])
    with pytest.raises(CorpusError, match="document 5 of"):
        make_sequences(corpus, 2, "error")


@pytest.mark.parametrize("overlong", ["error", "truncate", "split"])
def test_documents_that_fit_are_whole(corpus_of_lengths, overlong):
    sequences = make_sequences(corpus_of_lengths([3, 4, 1]), 4, overlong)
    assert contents(sequences) == [[0, 1, 2], [3, 4, 5, 6], [7]]
    assert sequences.describe(1).startswith("document 1 of ")
    assert "piece" not in sequences.describe(1)


def test_truncate(corpus_of_lengths):
    sequences = make_sequences(corpus_of_lengths([3, 9, 2]), 4, "truncate")
    assert contents(sequences) == [[0, 1, 2], [3, 4, 5, 6], [12, 13]]


def test_split(corpus_of_lengths):
    sequences = make_sequences(corpus_of_lengths([3, 9, 2, 8]), 4, "split")
    assert contents(sequences) == [
        [0, 1, 2],
        *([3, 4, 5, 6], [7, 8, 9, 10], [11]),
        [12, 13],
        *([14, 15, 16, 17], [18, 19, 20, 21]),
    ]
    assert sequences.lengths.tolist() == [3, 4, 4, 1, 2, 4, 4]
    assert sequences.index.tolist() == [0, 1, 1, 1, 2, 3, 3]
    assert sequences.describe(3).startswith("document 1 of ")
    assert sequences.describe(3).endswith(", piece from token 8")


def test_bad_settings(corpus_of_lengths):
    corpus = corpus_of_lengths([3])
    with pytest.raises(ValueError, match="overlong is 'drop'; choose from error, truncate, split"):
        make_sequences(corpus, 4, "drop")
    with pytest.raises(ValueError, match="seq_length is 0"):
        make_sequences(corpus, 0, "error")


def test_longest_sequence_must_fit_the_domain(corpus_of_lengths):
    sequences = make_sequences(corpus_of_lengths([100, 4000, 200]), 4000, "error")
    check_plannable(sequences, 4, {"capacity": 1024})
    with pytest.raises(CorpusError, match=r"document 1 of .* has 4,000 tokens, more than a domain of 4 ranks can hold"):
        check_plannable(sequences, 4, {"capacity": 900})
    with pytest.raises(ValueError, match="no scheduler 'budyring'; did you mean 'buddyring'"):
        check_plannable(sequences, 4, {"scheduler": "budyring"})
