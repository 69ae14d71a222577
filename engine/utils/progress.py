"""Progress of what takes time, on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time

from tqdm import tqdm

logger = logging.getLogger(__name__)
BAR_SECONDS = 0.1  # between two drawings of a bar
LINE_SECONDS = 5.0  # between two lines
BAR_DELAY = 0.3  # a task that takes less shows no bar


class Progress:
    """Shows how far a task is; call it as `progress(done, total)` within a `with` block.

    On a terminal it draws a bar, once the task has taken `delay` seconds. Elsewhere, also in notebooks, it writes
    whole lines: at the first call if `delay` is 0, every LINE_SECONDS, and at the end. The lines go to the log if the
    program has set one up, else to standard error. Shows nothing unless `enabled`, or if nothing is to be done.
    """

    def __init__(self, title: str, unit: str, *, enabled: bool = True, delay: float = 0.0):
        self._title, self._unit, self._enabled, self._delay = title, unit, enabled, delay
        self._has_bar = is_terminal()
        self._bar: tqdm | None = None
        self._done, self._total, self._detail = 0, 0, ""
        self._started = time.monotonic()
        self._next = self._started + (max(delay, BAR_DELAY) if self._has_bar else delay)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = time.monotonic() - self._started
        if self._bar is not None:
            self._draw()
            self._bar.close()
        elif self._enabled and self._total and not self._has_bar and kind is None and seconds >= self._delay:
            write_line(f"{self._line()} in {seconds:.1f} s")

    def __call__(self, done: int, total: int, detail: object = "") -> None:
        """Note that `done` of `total` is done. Cheap: most calls show nothing."""
        self._done, self._total, self._detail = done, total, str(detail)
        now = time.monotonic()
        if not self._enabled or not total or now < self._next:
            return
        if self._has_bar:
            self._next = now + BAR_SECONDS
            self._draw()
        elif done < total:  # else the last line follows
            self._next = now + LINE_SECONDS
            write_line(self._line())

    def _draw(self) -> None:
        if self._bar is None:
            self._bar = tqdm(total=self._total, desc=self._title, unit=f" {self._unit}", file=sys.stderr)
            self._bar.start_t -= time.monotonic() - self._started
        self._bar.n = self._done
        self._bar.set_postfix_str(self._detail, refresh=False)
        self._bar.refresh()

    def _line(self) -> str:
        return f"{self._title}: {self._done} of {self._total} {self._unit}" + (self._detail and f", {self._detail}")


def is_terminal() -> bool:
    """Return whether standard error is a terminal that can draw a bar."""
    try:
        return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def write_line(text: str) -> None:
    """Log a line, or write it to standard error in a program that has not set a log up, where it would be lost."""
    if logger.hasHandlers():
        logger.info("%s", text)
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader has ended
            print(text, file=sys.stderr, flush=True)
