"""Profile code of the calling thread for a while, also if a profiler of the user's is active."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def profiled(called: Callable[[types.FrameType, str, Any], object]) -> Iterator[None]:
    """Set a profile function, as `sys.setprofile` does, within the block. One that is set already is called too."""
    before: Any = sys.getprofile()

    def both(frame: types.FrameType, event: str, argument: Any) -> None:
        before(frame, event, argument)
        called(frame, event, argument)

    sys.setprofile(both if callable(before) else called)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:
            before.enable()  # of cProfile, which is no function: it pauses within the block


class unprofiled:  # noqa: N801 (a context manager, and a function would take longer to enter)
    """Pause the profile function of the calling thread within the block."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        if self._before is not None:
            sys.setprofile(None)

    def __exit__(self, *error: object) -> None:
        if callable(self._before):
            sys.setprofile(self._before)
        elif self._before is not None:
            self._before.enable()  # of cProfile
