"""Ambient state that a capture of module calls would bake in beside their arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol, cast

from torch import nn


class AmbientState(Protocol):
    """One kind of such state. Example: a precision that a context manager sets."""

    def of(self, modules: Sequence[nn.Module]) -> Hashable:
        """Return the current ambient state of a call of these modules."""

    def recreate(self, modules: Sequence[nn.Module], seen: Hashable) -> AbstractContextManager:
        """Return a context that recreates the state returned by `of` for a capture and restores the current one."""

    def watch(self, modules: Sequence[nn.Module]) -> Callable[[], bool]:
        """Return a check, after a capture, that non-parameter state read by these modules' graphs has not moved."""

    def replaying(self, modules: Sequence[nn.Module]) -> None:
        """Update tensors that the graph reads, right before it replays in place of these modules."""

    def replayed(self, modules: Sequence[nn.Module]) -> None:
        """Apply the host-side changes of an eager call after a forward was replayed."""


class AmbientStates:
    """Several kinds as one `AmbientState`."""

    def __init__(self, kinds: Sequence[AmbientState]):
        self._kinds = tuple(kinds)

    def of(self, modules: Sequence[nn.Module]) -> Hashable:
        return tuple([kind.of(modules) for kind in self._kinds])

    @contextmanager
    def recreate(self, modules: Sequence[nn.Module], seen: Hashable) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, one in zip(self._kinds, cast(tuple[Hashable, ...], seen), strict=True):
                stack.enter_context(kind.recreate(modules, one))
            yield

    def watch(self, modules: Sequence[nn.Module]) -> Callable[[], bool]:
        checks = [kind.watch(modules) for kind in self._kinds]
        return lambda: all(check() for check in checks)

    def replaying(self, modules: Sequence[nn.Module]) -> None:
        for kind in self._kinds:
            kind.replaying(modules)

    def replayed(self, modules: Sequence[nn.Module]) -> None:
        for kind in self._kinds:
            kind.replayed(modules)


def combined(kinds: Sequence[AmbientState]) -> AmbientState | None:
    """Return these kinds as one; None if there are none."""
    return AmbientStates(kinds) if len(kinds) > 1 else kinds[0] if kinds else None
