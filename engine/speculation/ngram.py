"""Propose draft tokens by prompt lookup: what followed the last n tokens where they occurred before.

Good at text that repeats its input, such as code edits, extraction and summaries. Costs no model.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.drafter import DraftRow

NGRAM_SIZES = (4, 3, 2)  # longest first


class NgramIndex:
    """The positions after each n-gram of one request's tokens, updated as tokens are appended."""

    def __init__(self) -> None:
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in NGRAM_SIZES]
        self._indexed = 0  # n-grams that end before this position are known

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that followed the most recent earlier occurrence of the last n-gram; [] if it is new.

        Where they reach the end of the text, they repeat. `token_ids` must extend the tokens of the last call.
        """
        length = len(token_ids)
        for end in range(self._indexed + 1, length):  # the n-gram at the very end is the one looked up
            for size, ends in zip(NGRAM_SIZES, self._ends, strict=True):
                if end >= size:
                    ends[tuple(token_ids[end - size : end])] = end
        self._indexed = max(self._indexed, length - 1)
        for size, ends in zip(NGRAM_SIZES, self._ends, strict=True):
            start = ends.get(tuple(token_ids[-size:])) if length > size else None
            if start is not None:
                period = length - start
                return [token_ids[start + index % period] for index in range(count)]
        return []


class NgramDrafter:
    """A Drafter that keeps an NgramIndex for each request."""

    def __init__(self) -> None:
        self._indices: dict[str, NgramIndex] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """See Drafter. The tokens of a request must extend the tokens of its last row."""
        return [
            self._indices.setdefault(row.request_id, NgramIndex()).propose(row.token_ids, row.limit) for row in rows
        ]

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)
