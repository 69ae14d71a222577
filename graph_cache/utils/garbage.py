"""Suspend Python's garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collections() -> Iterator[None]:
    """Let no garbage collection begin by itself in this process.

    Imports and the parsing of a large JSON body create hundreds of thousands of objects and no garbage. Collections
    look at them again and again: a tenth of the time of importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
