"""Which histories in the ledger begin with the same whole pages of tokens as a new prompt. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megaring.rollout.layout import PAGE


class PrefixIndex:
    """Histories by the pages of tokens that they begin with."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._holders: dict[int, dict[int, None]] = {}  # by the chained hash of pages, in order of insertion

    def __contains__(self, history: int) -> bool:
        return history in self._tokens

    def add(self, history: int, tokens: Sequence[int]) -> None:
        """Enter a history with its cached tokens, in place of what was known of it."""
        self.remove(history)
        self._tokens[history] = tuple(tokens[: len(tokens) // PAGE * PAGE])
        for key in _chain(self._tokens[history]):
            self._holders.setdefault(key, {})[history] = None

    def remove(self, history: int) -> None:
        """Forget a history, if it is known."""
        for key in _chain(self._tokens.pop(history, ())):
            holders = self._holders[key]
            del holders[history]
            if not holders:
                del self._holders[key]

    def clear(self) -> None:
        """Forget all."""
        self._tokens.clear()
        self._holders.clear()

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The history with the longest common prefix in whole pages, of equal ones the first, and its tokens.

        At least one token is left over, whose logits are needed.
        """
        best, size = None, 0
        for pages, key in enumerate(_chain(tokens[: (len(tokens) - 1) // PAGE * PAGE]), start=1):
            if key not in self._holders:
                break
            best, size = next(iter(self._holders[key])), pages * PAGE
        if best is None or self._tokens[best][:size] != tuple(tokens[:size]):  # equal hashes of unequal tokens
            return None
        return best, size


def _chain(tokens: Sequence[int]) -> Iterator[int]:
    """For every whole page a hash of all tokens up to its end."""
    key = 0
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        key = hash((key, tuple(tokens[start : start + PAGE])))
        yield key
