"""Profile code of the calling thread for a while, also if a profiler of the user's is active."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a profile function: compiled code, inside which it is called, neither compiles it nor what it calls."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


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


CAN_PAUSE = sys.version_info < (3, 12)  # later, each pause makes Python instrument all code anew


class unprofiled:  # noqa: N801 (a context manager, and a function would take longer to enter)
    """Pause the profile function of the calling thread within the block."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = sys.getprofile() if CAN_PAUSE else None
        if self._before is not None:
            sys.setprofile(None)

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            return
        if callable(self._before):
            sys.setprofile(self._before)
        else:
            self._before.enable()  # of cProfile
