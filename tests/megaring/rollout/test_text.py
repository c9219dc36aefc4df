"""Growing text against decoding everything at once, however characters and stop strings are cut into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaring.data.tokenizers import ByteTokenizer
from megaring.rollout.text import GrowingText

BYTES = ByteTokenizer()


def grow(text, stops=(), least=0):
    """Push a text byte by byte; returns the pieces that were shown, the stop, and the text."""
    growing, shown, found = GrowingText(BYTES, stops), [], None
    for count, token in enumerate(text.encode(), start=1):
        found = growing.push(token, count >= least)
        shown.append(growing.take(everything=found is not None))
        if found is not None:
            return shown, found, growing.text
    found = growing.finish()
    shown.append(growing.take(everything=True))
    return shown, found, growing.text


@settings(max_examples=200)
@given(
    st.text(st.sampled_from("ab\N{SNOWMAN}\N{PILE OF POO}\xe9"), max_size=12),
    st.lists(st.text("ab\xe9", min_size=1, max_size=3), max_size=3),
)
def test_pieces_add_up_and_end_before_the_first_stop(text, stops):
    shown, found, whole = grow(text, stops)
    assert "".join(shown) == whole
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        assert (found, whole) == (None, text)
        return
    end = min(ends)[
        0
    ]  # the stop that is complete first; of several that end there the longest, so the text is shortest
    start = min(start for finish, start in ends if finish == end)
    assert (whole, found) == (text[:start], text[start:end])


def test_nothing_of_a_stop_string_is_ever_shown():
    shown, found, _ = grow("one<|end|>two", ["<|end|>"])
    assert "".join(shown) == "one"
    assert found == "<|end|>"
    assert grow("one<|en", ["<|end|>"])[0][-1] == "<|en"  # held back until the end


def test_a_character_is_shown_when_it_is_complete():
    assert grow("\N{SNOWMAN}!")[0] == ["", "", "\N{SNOWMAN}", "!", ""]


def test_a_cut_character_at_the_end_is_shown_as_such():
    growing = GrowingText(BYTES, ())
    growing.push("\N{SNOWMAN}".encode()[0])
    assert growing.text == ""
    growing.finish()
    assert growing.text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("count", [9, 100])
def test_bytes_that_are_no_text_are_not_held_back_for_ever(count):
    growing = GrowingText(BYTES, ())
    for _ in range(count):
        growing.push(0xFF)
    assert len(growing.text) >= count - 8


def test_stops_before_min_tokens_do_not_count():
    _, found, text = grow("abcabc", ["bc"], least=4)
    assert (text, found) == ("abca", "bc")
