"""One graph and its life: NEW -> WARM -> CAPTURED -> CLOSED. The only way to a graph, whoever asks for it.

Owns the order of warm-up and capture, and that a failure leaves nothing behind. Knows no buckets and no policy.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence

import torch

from graph_cache.backends.base import CapturedGraph, Memory
from graph_cache.errors import CaptureError, GraphClosed
from graph_cache.pool import GraphPool
from graph_cache.reference import Reference


class RunnerState(enum.Enum):
    """Where a graph is in its life."""

    NEW = "new"
    WARM = "warm"
    CAPTURED = "captured"
    CLOSED = "closed"


class GraphRunner:
    """Captures `fn`, a call without arguments on static tensors, and replays it.

    `statics` lists the static tensors that a run reads and writes. A capture leaves them, and the generators, as it
    found them; the CPU backend checks its replay against them.
    """

    def __init__(
        self,
        fn: Callable[[], None],
        pool: GraphPool,
        *,
        statics: Callable[[], list[torch.Tensor]],
        generators: Sequence[torch.Generator] = (),
        warmup_runs: int | None = None,
        memory: Memory | None = None,
        grad: bool = False,
        checked: bool = True,
    ):
        if checked and warmup_runs is not None and warmup_runs < 1:
            raise CaptureError(f"warmup_runs={warmup_runs}: a checked capture needs at least 1 to compare with")
        self.state = RunnerState.NEW
        self.capture_seconds = 0.0
        self._fn = fn
        self._pool = pool
        self._statics = statics
        self._generators = tuple(generators)
        self._warmup_runs = pool.backend.warmup_runs if warmup_runs is None else warmup_runs
        self._memory = pool.memory if memory is None else memory
        self._grad = grad
        self._checked = checked
        self._graph: CapturedGraph | None = None

    @property
    def engine(self) -> str:
        """How it replays: cuda_graph, torchscript or loop; empty before capture."""
        return self._graph.engine if self._graph else ""

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that its capture needs (CPU) or added (CUDA); 0 before capture."""
        return self._graph.nbytes if self._graph else 0

    def capture(self) -> None:
        """Run `fn` eagerly to warm up, then capture it. Holds the pool's lock.

        Raises CaptureError (CaptureRefused for an operation that no graph can hold); the runner is then closed, the
        flags are reset and the device is usable.
        """
        if self.state is not RunnerState.NEW:
            raise CaptureError(f"a graph is captured once; this one is {self.state.value}")
        started = time.perf_counter()
        mode = torch.enable_grad() if self._grad else torch.inference_mode()
        with self._pool.session(), mode:
            reference = None
            try:
                if self._checked:
                    reference = Reference(self._statics, self._all_generators())
                    self._warm_up(reference)
                with self._pool.capture_flag():
                    self._graph = self._pool.backend.capture(self._fn, self._memory, self._generators, reference)
            except BaseException as error:
                self.close()
                if isinstance(error, CaptureError) or not isinstance(error, Exception):
                    raise
                raise CaptureError(f"capture failed: {type(error).__name__}: {error}") from error
            finally:
                if reference is not None:
                    reference.rewind()
        self.state = RunnerState.CAPTURED
        self.capture_seconds = time.perf_counter() - started

    def _all_generators(self) -> list[torch.Generator]:
        """Every generator that a warm-up may draw from: the device's own too, whether or not it is registered."""
        found = {id(generator): generator for generator in (self._pool.backend.default_generator, *self._generators)}
        return list(found.values())

    def _warm_up(self, reference: Reference) -> None:
        with self._pool.warmup_flag(), self._pool.backend.on_capture_stream():
            for _ in range(self._warmup_runs):
                reference.rewind()
                self._fn()
            reference.remember()
            reference.rewind()
        self.state = RunnerState.WARM

    def replay(self) -> None:
        """Run the graph on the static tensors. Raises GraphClosed unless it is captured."""
        if self._graph is None:
            raise GraphClosed(f"there is no graph to replay: this one is {self.state.value}")
        self._graph.replay()

    @property
    def bare_replay(self) -> Callable[[], None]:
        """The captured graph's own replay, for a loop that counts microseconds: take it after the capture, drop it at
        the close."""
        if self._graph is None:
            raise GraphClosed(f"there is no graph to replay: this one is {self.state.value}")
        return self._graph.replay

    def close(self) -> None:
        """Destroy the graph and let go of what it held. A closed runner stays closed."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self._fn = self._statics = _closed
        self.state = RunnerState.CLOSED


def _closed() -> list[torch.Tensor]:
    raise GraphClosed("this graph was closed; capture it again")
