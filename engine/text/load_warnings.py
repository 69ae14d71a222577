"""Warnings about a tokenizer's files, which one of the processes that load the tokenizer logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

_ARE_LOGGED = ContextVar("are_logged", default=True)


def warn(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a warning, except within `unlogged`."""
    if _ARE_LOGGED.get():
        logger.warning(message, *args)


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Leave out the warnings of this thread: another process or thread loads the same files and logs them."""
    token = _ARE_LOGGED.set(False)
    try:
        yield
    finally:
        _ARE_LOGGED.reset(token)
