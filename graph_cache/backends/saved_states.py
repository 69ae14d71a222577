"""States of the random generator that a forward saves and its backward sets, as checkpoints do.

A checkpoint's backward runs the forward again, and must draw the same random numbers. Where forward and backward are
two graphs, the backend decides how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class SavedStates:
    """The states that one captured forward saves. This class does nothing: a tape records saving and setting itself."""

    def forward(self) -> AbstractContextManager[None]:
        """Return a context for the capture of the forward."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for the capture of the backward. Raises CaptureRefused at its end."""
        return nullcontext()

    def eager_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward that runs eager, on what a replay of the forward has saved."""
        return nullcontext()

    def around_forward(self, replay: Callable[[], None]) -> Callable[[], None]:
        """Return the forward's replay, with what the backward needs of it."""
        return replay

    def around_backward(self, replay: Callable[[], None]) -> Callable[[], None]:
        """Return the backward's replay, which draws the same random numbers as the last replay of the forward."""
        return replay


@contextmanager
def replaced(owners: Iterable[Any], **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of modules within the block. Other threads get the new ones too: autograd runs in its own."""
    originals = [(owner, name, getattr(owner, name)) for owner in owners for name in functions]
    for owner, name, _ in originals:
        setattr(owner, name, functions[name])
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
