"""The text of a sample while it grows: decoding token by token, and stop strings. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CUT = 8  # tokens that a character may be cut into; a tail that is longer never was one


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer, as those of ``megaring.data.tokenizers`` have it."""

    vocab_size: int
    eod_id: int | None

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; cut characters come out as U+FFFD."""


class GrowingText:
    """Decodes tokens as they come and finds the first of ``stops``.

    Only a short tail of ids is decoded again for each token; it begins where text was last complete, and one stretch
    earlier, because a tokenizer may write a word differently at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._context = self._complete = 0  # ids before these: shown long ago, and shown
        self._given = 0  # characters that ``take`` has returned
        self.text = ""

    def push(self, token: int, search: bool = True) -> str | None:
        """Append a token; returns the stop string that its text completes, before which ``text`` is then cut."""
        self._ids.append(token)
        shown = self._tokenizer.decode(self._ids[self._context : self._complete])
        longer = self._tokenizer.decode(self._ids[self._context :])
        if longer.endswith(_REPLACEMENT) and len(self._ids) - self._complete < _LONGEST_CUT:
            return None
        return self._extend(longer[len(shown) :], search)

    def finish(self, search: bool = True) -> str | None:
        """Show what is left of a cut character; returns a stop string as ``push`` does."""
        shown = self._tokenizer.decode(self._ids[self._context : self._complete])
        return self._extend(self._tokenizer.decode(self._ids[self._context :])[len(shown) :], search)

    def take(self, everything: bool) -> str:
        """The text since the last call; without ``everything``, less an end that may become a stop string."""
        end = len(self.text) if everything else len(self.text) - self._held_back()
        fresh = self.text[self._given : end]
        self._given = max(self._given, end)
        return fresh

    def _extend(self, fresh: str, search: bool) -> str | None:
        self._context, self._complete = self._complete, len(self._ids)
        before = len(self.text)
        self.text += fresh
        found = []
        for stop in self._stops if search and fresh else ():
            # It must end in the new text: one that was complete before min_tokens does not count.
            place = self.text.find(stop, max(0, before - len(stop) + 1))
            if place >= 0:
                found.append((place, -len(stop), stop))
        if not found:
            return None
        place, _, stop = min(found)
        self.text = self.text[:place]
        return stop

    def _held_back(self) -> int:
        longest = min(max(map(len, self._stops), default=1) - 1, len(self.text))
        for size in range(longest, 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return size
        return 0
