"""Order of the graphed calls of one microbatch, and which of them may serve a call now.

Calls are captured in the order of the recorded step, forwards first, then backwards. A forward's temporaries may lie in
memory that later calls save tensors into. So only an entry after all that await their backward may serve a call.
Independent of modules and autograd.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Signature = TypeVar("Signature", bound=Hashable)
Entry = TypeVar("Entry")


class ReplayOrder(Generic[Signature, Entry]):
    """Entries in capture order, by call signature. Each is free or awaits its backward."""

    def __init__(self) -> None:
        self._signatures: list[Signature] = []
        self._indices: dict[Signature, list[int]] = {}
        self._awaiting: list[bool] = []
        self._last = -1  # last index that awaits its backward
        self.entries: list[Entry | None] = []

    def __len__(self) -> int:
        return len(self._signatures)

    @property
    def awaiting(self) -> int:
        """Number of entries that await their backward."""
        return sum(self._awaiting)

    def awaits(self, index: int) -> bool:
        """Whether the entry at this index awaits its backward."""
        return self._awaiting[index]

    def knows(self, signature: Signature) -> bool:
        """Whether any entry serves this signature, free or not."""
        return signature in self._indices

    def signatures(self) -> set[Signature]:
        """Return all signatures that the entries serve."""
        return set(self._indices)

    def signature(self, index: int) -> Signature:
        """Return the signature that the entry at this index serves."""
        return self._signatures[index]

    def next_index(self) -> int:
        """Return the index after the last entry that awaits its backward: the next call of a step run as recorded."""
        return self._last + 1

    def find(self, signature: Signature, after: int = -1) -> int | None:
        """Return the first index beyond `after` that may serve this signature now, or None."""
        first = max(self._last, after)
        return next((index for index in self._indices.get(signature, ()) if index > first), None)

    def add(self, signature: Signature) -> int:
        """Append an entry for this signature and return its index."""
        index = len(self._signatures)
        self._signatures.append(signature)
        self._indices.setdefault(signature, []).append(index)
        self._awaiting.append(False)
        self.entries.append(None)
        return index

    def serves(self, index: int) -> bool:
        """Whether this index may serve calls, that is, was not removed."""
        return index in self._indices.get(self._signatures[index], ())

    def remove(self, index: int) -> None:
        """Stop serving calls from this index: its capture failed."""
        indices = self._indices[self._signatures[index]]
        indices.remove(index)
        if not indices:
            del self._indices[self._signatures[index]]  # its signature becomes unknown again

    def await_backward(self, index: int) -> None:
        """Mark the entry as used by a forward. `index` must be beyond all entries that await their backward."""
        self._awaiting[index] = True
        self._last = index

    def release(self, index: int) -> None:
        """Mark the entry as free: its backward is done or will never run."""
        self._awaiting[index] = False
        while self._last >= 0 and not self._awaiting[self._last]:
            self._last -= 1
