"""Digest of captured graphs: a hash of what a replay runs, equal after a recapture of the same code.

It does not depend on where memory is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Digest:
    """Digest of one or more graphs.

    - `value`: 16 hexadecimal digits; empty without a graph.
    - `nodes`: number of nodes, which are operations on a CPU.
    - `unverified_bytes`: bytes of arguments that are left out, such as structures and descriptors of kernels.
    """

    value: str = ""
    nodes: int = 0
    unverified_bytes: int = 0

    @classmethod
    def combined(cls, digests: Iterable[Digest]) -> Digest:
        """Return one digest of several graphs that are replayed in this order."""
        found = [digest for digest in digests if digest.value]
        if len(found) < 2:
            return found[0] if found else cls()
        value = hashed(digest.value for digest in found)
        return cls(value, sum(one.nodes for one in found), sum(one.unverified_bytes for one in found))

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Digest:
        """Return the digest in a row with `columns`."""
        return cls(row["digest"], row["nodes"], row["unverified_bytes"])

    def columns(self) -> dict[str, str | int]:
        """Return the digest as columns of a row of plain values."""
        return {"digest": self.value, "nodes": self.nodes, "unverified_bytes": self.unverified_bytes}


class Numbers:
    """Numbers for addresses and storages, in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def of(self, address: int) -> int:
        """Return the number of an address."""
        return self._numbers.setdefault(address, len(self._numbers))


def hashed(parts: Iterable[object]) -> str:
    """Return a hash of the text of these parts, 16 hexadecimal digits."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(repr(part).encode())
        found.update(b"\0")
    return found.hexdigest()
