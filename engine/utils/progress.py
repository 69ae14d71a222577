"""How a warm-up is shown: a progress bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm

from graph_cache.keys import GraphKey

logger = logging.getLogger(__name__)
MAX_LOG_LINES = 5  # about as many log lines as a warm-up may take


class WarmProgress:
    """Called as `progress(done, total, key)` after each capture of a warm-up."""

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
