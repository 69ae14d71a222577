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


def without_cut_marker(pending: str) -> str:
    """Return text that was held back at the end of a cut output as it is shown: a part of a marker is dropped.

    One character, such as "<", may as well be text.
    """
    return pending if len(pending) < 2 else ""
