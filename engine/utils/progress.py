"""Warm-up progress: a progress bar on a terminal, log lines otherwise."""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm

from graph_cache.keys import GraphKey

logger = logging.getLogger(__name__)
MAX_LOG_LINES = 5  # approximate number of log lines per warm-up


class WarmProgress:
    """Progress callback of a warm-up: `progress(done, total, key)` after each capture."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def __call__(self, done: int, total: int, key: GraphKey) -> None:
        if not sys.stderr.isatty():
            if done == total or done % max(1, total // MAX_LOG_LINES) == 0:
                logger.info("captured %d of %d graphs", done, total)
            return
        if self._bar is None:
            self._bar = tqdm(total=total, unit="graph", desc="capturing")
        self._bar.set_postfix_str(str(key), refresh=False)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
