"""Find seeds that code gives to random generators during a recording, also those that a generator has already.

A replay begins where the last one ended, and not at the seed again. The state of the generator shows this only if it
differed before. `fork_rng` and checkpoints set states that they read in the same run: a comparison of states suffices.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from graph_cache.guards.ownership import CORE, TORCH, is_core_file
from graph_cache.utils.profiling import profiled

SETTERS = frozenset(("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset"))
_CHECKPOINT = torch.utils.checkpoint.__file__


@contextmanager
def observe_seeds(generators: Container[object], seeded: Callable[[], None]) -> Iterator[None]:
    """Call `seeded` when code of this thread sets the state of one of the generators, given by their C++ objects."""

    def called(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument.__name__ in SETTERS and isinstance(argument.__self__, torch.Generator):
            if getattr(argument.__self__, "_cdata", None) in generators and not _restores(frame):
                seeded()

    with profiled(called):
        yield


def _restores(frame: types.FrameType | None) -> bool:
    """Whether a state is set that the same run has read: by `fork_rng`, a checkpoint, or this core."""
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, CORE)):
        code = frame.f_code
        if code.co_name == "fork_rng" or code.co_filename == _CHECKPOINT:
            return True
        if code.co_filename.startswith(CORE):
            return is_core_file(code.co_filename)
        frame = frame.f_back
    return False
