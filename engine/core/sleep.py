"""Sleep: release the memory of weights, graphs and KV cache between steps, and restore it at the same addresses.

A sleep is a pause during which memory is released part by part. It ends when all parts are there again and no weight
is missing; the pause ends with it, unless it was there before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from engine.core.pause import Pause
from engine.errors import RequestError, WeightUpdateError
from engine.executor.interface import Executor
from engine.protocol.sleep import GRAPHS, KV_CACHE, MEMORY_PARTS, SLEEP_TAGS, WEIGHTS, check_tags

logger = logging.getLogger(__name__)

ASLEEP = "the engine sleeps: wake it up (/wake_up, or wake_up() in Python)"


class Sleep:
    """The sleep of one engine: which parts of memory are released, and whether weights are missing.

    `begin_pause(mode)` pauses, and `forget_kv` drops all keys and values. Not thread-safe.
    """

    def __init__(
        self,
        executor: Executor,
        pause: Pause,
        begin_pause: Callable[[str], None],
        resume: Callable[[], None],
        forget_kv: Callable[[], None],
    ):
        self._executor, self._pause = executor, pause
        self._begin_pause, self._resume, self._forget_kv = begin_pause, resume, forget_kv
        self._is_enabled = executor.capabilities.config.enable_sleep_mode
        self._ends_pause = False  # the pause began with the sleep
        self._is_asleep = False  # also at level 0
        self._missing: list[str] = []
        self.released: tuple[str, ...] = ()
        """The parts of memory that are released."""
        self.discarded = False
        """Whether the weights were discarded, not kept, when they were released last."""

    @property
    def is_sleeping(self) -> bool:
        """Whether any part of memory is released, or scheduling sleeps (level 0)."""
        return self._is_asleep

    def begin(self, parts: Sequence[str], discards: bool, mode: str | None = None) -> str:
        """Check that these parts can be released, and pause; return the mode of the pause.

        `mode` None: the mode of the pause there is, else "abort". Raises RequestError; nothing has changed then.
        """
        self._check(parts, discards)
        had_pause = self._pause.mode is not None and not self._ends_pause
        found = mode or self._pause.mode or "abort"
        if found != self._pause.mode:
            self._begin_pause(found)
        self._ends_pause = not had_pause
        return found

    def release(self, parts: Sequence[str], discards: bool = False) -> None:
        """Release these parts of memory, after `begin` and the end of the requests that it waits for.

        Raises RequestError if the pause was ended meanwhile.
        """
        self._check(parts, discards)
        if self._pause.mode is None:
            raise RequestError("the pause was ended before the memory was released: call sleep again")
        self._is_asleep = True
        wanted = [part for part in parts if part not in self.released]
        if not wanted:
            return
        if KV_CACHE in wanted or discards:
            self._forget_kv()
        released: dict[str, int] = {}
        self._executor.call("trim_memory")
        self._pause.obstacle = ASLEEP
        try:
            for part in wanted:
                released[part] = self._executor.call("release_memory", part, discards)
                self.released = (*self.released, part)
                if part == WEIGHTS:
                    self.discarded = discards
        except BaseException:
            self._update()
            raise
        amounts = ", ".join(f"{part} {size / 2**30:.2f} GiB" for part, size in released.items())
        logger.info("the engine sleeps; released: %s", amounts)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore the parts with these tags, or all. When nothing sleeps any more, the sleep ends.

        KV_CACHE restores the graphs' memory too. Without a sleep it does nothing. Raises RequestError for an unknown
        tag, and EngineError if there is no room; parts that were restored before stay.
        """
        wanted = set(check_tags(tags)) if tags is not None else set(SLEEP_TAGS)
        if KV_CACHE in wanted:
            wanted.add(GRAPHS)
        for part in MEMORY_PARTS:
            if part in wanted and part in self.released:
                self._executor.call("restore_memory", part)
                self.released = tuple(one for one in self.released if one != part)
                if part == WEIGHTS and self.discarded:
                    self.weights_came()
        if wanted:
            self._update()

    def weights_came(self) -> None:
        """Find out which weights are missing: some may have been written."""
        if self.discarded:
            self._missing = self._executor.call("missing_weights")
            self._update()

    def paused(self) -> None:
        """Note a pause that was asked for by itself: it outlives the sleep."""
        self._ends_pause = False

    def resumed(self) -> None:
        """Note that the pause was ended: with no memory released, the sleep ends too."""
        self._is_asleep = self._ends_pause = False

    def check_graphs(self) -> None:
        """Raise RequestError while graphs can't be captured or dropped."""
        if self._pause.obstacle:
            raise RequestError(self._pause.obstacle)

    def check_weights(self) -> None:
        """Raise WeightUpdateError while weights can't be written."""
        if WEIGHTS in self.released:
            raise WeightUpdateError("the weights sleep: wake them up first (/wake_up?tags=weights)")

    def check_readable(self) -> None:
        """Raise WeightUpdateError while weights can't be read: they sleep, or were discarded."""
        self.check_weights()
        if self._missing:
            raise WeightUpdateError(_missing(self._missing))

    def _check(self, parts: Sequence[str], discards: bool) -> None:
        if not parts:
            return
        if not self._is_enabled:
            raise RequestError(
                "this engine can't release its memory: start it with enable_sleep_mode (--enable-sleep-mode)"
            )
        if WEIGHTS in parts and self._executor.call("shares_weights"):
            raise RequestError(
                "the weights are shared with a trainer (share_weights), which would lose them: release the KV cache "
                "alone (release_kv_cache_memory)"
            )
        if WEIGHTS in parts and WEIGHTS in self.released and discards != self.discarded:
            raise RequestError(
                f"the engine sleeps at level {2 if self.discarded else 1} already: wake it up first", param="level"
            )

    def _update(self) -> None:
        """End the sleep if nothing is released, and the pause that began with it if no weight is missing."""
        if self.released:
            return
        self._is_asleep = False
        self._pause.obstacle = _missing(self._missing) if self._missing else ""
        if not self._missing and self._ends_pause:
            self._resume()


def _missing(names: Sequence[str]) -> str:
    return (
        f"the weights were discarded by sleep level 2, and {len(names)} of them have not come since, such as "
        f"{names[0]}: update the weights"
    )
