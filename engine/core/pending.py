"""Commands that wait for something outside the loop, such as a trainer, while the loop goes on with its steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple


class Pending(NamedTuple):
    """The result that a command will have: `finish` of the future's value, called on the loop's thread."""

    future: Future[Any]
    finish: Callable[[Any], Any]
