"""Markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a marker and is shorter than it."""
    longest = max(map(len, markers), default=1)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(one.startswith(end) and len(one) > length for one in markers):
            return length
    return 0
