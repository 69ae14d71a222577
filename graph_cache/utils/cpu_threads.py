"""Choose the number of threads of a CPU's steps while they run.

Threads of one operation wait for each other. Beside another busy process, one of them waits for a core, and all others
for that one, at every operation: two threads on two cores were seen to run a step five times slower than one thread.
`ThreadTuner` notices that steps wait, measures steps with other numbers of threads, and keeps the fastest.

Results of different numbers of threads may differ in the last bits, so a number that the user chose never changes.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # PyTorch takes the number of threads from them
STALLED_SHARE = 0.1  # of the time that a step's thread did not run: more of it begins a trial
STALLED_SECONDS = 0.05  # of steps over which this share is taken
BLOCK = 3  # steps of a trial in a row with one number; the first one, which starts threads, is not counted
SAMPLES = 4  # counted steps of one kind with each number
SLOWER, MUCH_SLOWER = 1.5, 3.0  # times the fastest number's: not tried again in a trial, after two samples or after one
FASTER = 0.9  # of the time with the present number: less of it changes the number
MAX_TRIAL_STEPS = 128
MIN_PAUSE, MAX_PAUSE = 1.0, 20.0  # seconds between trials; doubled by each one that changes nothing
COST = 25.0  # the pause after a trial is at least the time that it lost, times this


def threads_are_unset() -> bool:
    """Return whether the number of threads is PyTorch's default, which nobody chose: one for each core.

    False if an environment variable sets it, or `torch.set_num_threads` to another number.
    """
    if any(os.environ.get(name) for name in VARIABLES):
        return False
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return torch.get_num_threads() in (len(cpus), len({_siblings(cpu) for cpu in cpus}))


def _siblings(cpu: int) -> str:
    """Return the logical CPUs of the core that has `cpu`, as Linux lists them."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


class ThreadTuner:
    """The number of threads of one program's steps, at most PyTorch's number at the construction.

    A step runs within `step`, or from one `begin` to the next. While steps keep their core, nothing is tried. If they
    wait, or run with fewer threads than the most, a trial runs steps with nearby numbers in turn and compares steps of
    one `kind`. Not thread-safe.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ):
        self._clock, self._cpu_clock = clock, cpu_clock
        self.most = self.count = torch.get_num_threads()
        self._counts = _counts_up_to(self.most)
        self._stalled = self._observed = 0.0  # seconds
        self._pause, self._next_trial = MIN_PAUSE, 0.0
        self._trial: _Trial | None = None
        self._last_count = self.most  # of the step before
        self._begun: tuple[Hashable, int, float, float, float] | None = None  # kind, count, work and clocks
        self._is_mine = True  # nobody else has changed the number since the last `begin`

    @contextmanager
    def step(self, kind: Hashable, work: float = 1.0) -> Iterator[None]:
        """Run the body as a step: with the number of threads to use now, which is restored at its end.

        Steps of one `kind` take a time proportional to `work`. A body that raises is not counted. Where the caller has
        changed PyTorch's number, the step runs with the caller's.
        """
        if torch.get_num_threads() != self.most:
            yield
            return
        count = self._next(kind)
        wall, cpu = self._clock(), self._cpu_clock()
        with self._running(count):
            yield
        self._observe(kind, count, work, self._clock() - wall, self._cpu_clock() - cpu)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run the body with the present number of threads, and count nothing."""
        if torch.get_num_threads() != self.most:
            yield
            return
        with self._running(self.count):
            yield

    @contextmanager
    def _running(self, count: int) -> Iterator[None]:
        if count == self.most:
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(self.most)

    def begin(self, kind: Hashable, work: float = 1.0) -> None:
        """End the step before, if any, and begin the next: from here on, PyTorch uses the number to use now.

        Does nothing more once other code has changed PyTorch's number.
        """
        if not self._is_mine:
            return
        current = self._begun[1] if self._begun is not None else self.most
        if torch.get_num_threads() != current:
            logger.info("the number of CPU threads was set to %d: it stays so", torch.get_num_threads())
            self._is_mine, self._begun = False, None
            return
        wall, cpu = self._clock(), self._cpu_clock()
        if self._begun is not None:
            before, count, amount, began, cpu_began = self._begun
            self._observe(before, count, amount, wall - began, cpu - cpu_began)
        count = self._next(kind)
        if count != current:
            torch.set_num_threads(count)
        self._begun = kind, count, work, wall, cpu

    def end(self) -> None:
        """End the step that began last without counting it, and restore PyTorch's number."""
        if self._begun is not None and torch.get_num_threads() == self._begun[1]:
            torch.set_num_threads(self.most)
        self._begun, self._is_mine = None, True

    def _next(self, kind: Hashable) -> int:
        """Return the number of threads of the next step."""
        if self._trial is None and self.most > 1 and self._clock() >= self._next_trial:
            waits = self._observed >= STALLED_SECONDS and self._stalled > STALLED_SHARE * self._observed
            if waits or self.count < self.most:
                self._trial = _Trial(self.count, self._counts)
        return self.count if self._trial is None else self._trial.next(kind)

    def _observe(self, kind: Hashable, count: int, work: float, seconds: float, cpu_seconds: float) -> None:
        """Record a step that took `seconds`, of which its thread ran `cpu_seconds`."""
        if self._observed >= STALLED_SECONDS:
            self._observed = self._stalled = 0.0
        self._observed += seconds
        self._stalled += max(0.0, seconds - cpu_seconds)
        follows, self._last_count = count == self._last_count, count
        if self._trial is None:
            return
        self._trial.observe(kind, count, seconds, seconds / max(work, 1.0), counts=follows)
        if (found := self._trial.fastest()) is not None:
            self._finish(self._trial, *found)

    def _finish(self, trial: _Trial, count: int, ratio: float) -> None:
        """End a trial that found `count`, whose steps take `ratio` of the time with the present number."""
        self._trial = None
        self._observed = self._stalled = 0.0
        if count != self.count and ratio < FASTER:
            logger.info(
                "steps use %d CPU thread%s instead of %d: they take %.2f of the time beside what else runs here; "
                "results may differ in the last bits (set the number of threads to fix it)",
                count, "s" * (count != 1), self.count, ratio,
            )  # fmt: skip
            self.count, self._pause = count, MIN_PAUSE
        else:
            self._pause = min(2 * self._pause, MAX_PAUSE)
        self._next_trial = self._clock() + max(self._pause, COST * trial.lost())


class _Trial:
    """Steps with the present number of threads, its neighbours, one thread and the most threads, in turn."""

    def __init__(self, present: int, counts: list[int]):
        place = counts.index(present)
        near = counts[max(0, place - 2) : place + 3]
        others = [count for count in (*near, counts[-1], counts[0]) if count != present]
        self._present = present
        self._counts = list(dict.fromkeys([present, *others]))
        self._times: dict[Hashable, dict[int, list[float]]] = defaultdict(lambda: {one: [] for one in self._counts})
        self._seconds: list[tuple[int, float]] = []
        self._block: tuple[int, int] = (present, 0)  # the number of threads, and the steps left with it

    def next(self, kind: Hashable) -> int:
        """Return the number of threads of the next step, of this kind."""
        count, left = self._block
        times = self._times[kind]
        alive = self._alive(kind)
        if left == 0 or count not in alive:
            count, left = min(alive, key=lambda one: len(times[one])), BLOCK
        self._block = count, left - 1
        return count

    def observe(self, kind: Hashable, count: int, seconds: float, time_of_work: float, *, counts: bool) -> None:
        """Record a step. `counts`: it ran with the same number of threads as the one before."""
        self._seconds.append((count, seconds))
        if counts and count in self._times[kind]:
            self._times[kind][count].append(time_of_work)

    def _alive(self, kind: Hashable) -> list[int]:
        """Return the numbers that are not known to be slower for steps of this kind, the present one among them."""
        medians = {count: statistics.median(times) for count, times in self._times[kind].items() if times}
        if not medians:
            return self._counts

        def is_slower(count: int) -> bool:
            limit = MUCH_SLOWER if len(self._times[kind][count]) == 1 else SLOWER
            return count in medians and medians[count] > limit * min(medians.values())

        return [count for count in self._counts if count == self._present or not is_slower(count)]

    def fastest(self) -> tuple[int, float] | None:
        """Return the fastest number, and its time over the present number's; None while it is not known.

        A trial that takes too long ends with the present number.
        """
        for kind, times in self._times.items():
            alive = self._alive(kind)
            needed = SAMPLES if len(alive) > 1 else 1
            if all(len(times[count]) >= needed for count in alive) and times[self._present]:
                best = min(alive, key=lambda count: statistics.median(times[count]))
                return best, statistics.median(times[best]) / statistics.median(times[self._present])
        return (self._present, 1.0) if len(self._seconds) >= MAX_TRIAL_STEPS else None

    def lost(self) -> float:
        """Return the seconds that steps with other numbers took longer than those with the present one."""
        present = [seconds for count, seconds in self._seconds if count == self._present]
        usual = statistics.median(present) if present else 0.0
        return sum(max(0.0, seconds - usual) for count, seconds in self._seconds if count != self._present)


def _counts_up_to(most: int) -> list[int]:
    """Return the numbers to choose from, descending: the most, one less (for one busy process), 3/4, 1/2, 3/8, …"""
    counts = {1, most, max(1, most - 1)}
    half = most
    while half > 1:
        counts |= {max(1, 3 * half // 4), half // 2}
        half //= 2
    return sorted(counts, reverse=True)
