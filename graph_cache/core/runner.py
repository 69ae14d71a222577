"""Lifecycle of one graph: NEW -> WARM -> CAPTURED -> CLOSED. All graphs are created through a GraphRunner.

Orders warm-up and capture, and cleans up after a failure. Buckets and eviction policy are handled by the cache.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from graph_cache.backends.base import CapturedGraph, Memory
from graph_cache.core.pool import GraphPool
from graph_cache.errors import CaptureError, GraphClosed
from graph_cache.guards.audit import StorageAudit
from graph_cache.guards.reference import Reference
from graph_cache.guards.torch_settings import free_frames
from graph_cache.utils.digest import Digest


class RunnerState(enum.Enum):
    """Lifecycle state of a graph."""

    NEW = "new"
    WARM = "warm"
    CAPTURED = "captured"
    CLOSED = "closed"


class GraphRunner:
    """Capture `fn`, a call without arguments on static tensors, and replay it.

    `statics` lists the static tensors that a run reads and writes. A capture restores them and the generators; the CPU
    backend compares its replay with them. `fn` runs in inference mode unless it records gradients (`grad`) or
    `inference=False`. `checked=False` skips the warm-up and the comparison. With `restores`, a capture also restores
    all other memory that its runs write, for which it needs a copy of that memory; without checks, where captures run.
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
        inference: bool = True,
        checked: bool = True,
        restores: bool = False,
    ):
        if checked and warmup_runs is not None and warmup_runs < 1:
            raise CaptureError(f"warmup_runs={warmup_runs}: a checked capture needs at least 1 to compare with")
        self.state = RunnerState.NEW
        self.capture_seconds = 0.0
        self.written: list[torch.UntypedStorage] | None = None  # memory that `restores` restored; None if unknown
        self._fn = fn
        self._pool = pool
        self._statics = statics
        self._generators = tuple(generators)
        self._warmup_runs = pool.backend.warmup_runs if warmup_runs is None else warmup_runs
        self._memory = pool.memory if memory is None else memory
        self._grad = grad
        self._inference = inference
        self._checked = checked
        self._restores = restores
        self._graph: CapturedGraph | None = None

    @property
    def engine(self) -> str:
        """How the graph replays: cuda_graph, torchscript or loop; empty before capture."""
        return self._graph.engine if self._graph else ""

    @property
    def nbytes(self) -> int:
        """Pool bytes that the capture needs (CPU) or added (CUDA); 0 before capture."""
        return self._graph.nbytes if self._graph else 0

    @property
    def digest(self) -> Digest:
        """Hash of what a replay runs; empty before capture."""
        return self._graph.digest if self._graph else Digest()

    def capture(self) -> None:
        """Run `fn` eagerly to warm up, then capture it. Holds the pool's lock.

        Raises CaptureError (CaptureRefused for an operation that a graph cannot contain). The runner is then closed,
        the flags are reset and the device is usable.
        """
        if self.state is not RunnerState.NEW:
            raise CaptureError(f"a runner captures once; this one is {self.state.value}")
        started = time.perf_counter()
        mode = torch.inference_mode() if self._inference and not self._grad else torch.set_grad_enabled(self._grad)
        with self._pool.session(), mode:
            reference = audit = None
            fn = run = self._fn
            try:
                if self._checked and self._restores:
                    audit = StorageAudit(saves=True)
                    run = audit.audited(self._fn)
                    if self._pool.backend.capture_runs:
                        fn = run
                if self._checked or (self._restores and self._pool.backend.capture_runs):
                    reference = Reference(self._statics, self._all_generators(), audit)
                if self._checked and reference is not None:
                    self._warm_up(run, reference)
                with self._pool.capture_flag():
                    self._graph = self._pool.backend.capture(fn, self._memory, self._generators, reference)
            except BaseException as error:
                free_frames(error)
                self.close()
                if isinstance(error, CaptureError) or not isinstance(error, Exception):
                    raise
                raise CaptureError(f"capture failed: {type(error).__name__}: {error}") from error
            finally:
                if reference is not None:
                    reference.rewind()
            if audit is not None:
                self.written = [audit.outside[address] for address in audit.written]
        self.state = RunnerState.CAPTURED
        self.capture_seconds = time.perf_counter() - started

    def _all_generators(self) -> list[torch.Generator]:
        """Return every generator that a warm-up may use, including the device's default, registered or not."""
        found = {id(generator): generator for generator in (self._pool.backend.default_generator, *self._generators)}
        return list(found.values())

    def _warm_up(self, run: Callable[[], None], reference: Reference) -> None:
        with self._pool.warmup_flag(), self._pool.backend.on_capture_stream():
            for _ in range(self._warmup_runs):
                reference.rewind()
                self._pool.backend.interrupts.checking(run)()
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
        """The captured graph's own `replay`, for latency-critical loops.

        Fetch it after the capture and discard it when the runner closes.
        """
        if self._graph is None:
            raise GraphClosed(f"there is no graph to replay: this one is {self.state.value}")
        return self._graph.replay

    def close(self) -> None:
        """Destroy the graph and release what it held. A closed runner cannot be reused."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self.written = None
        self._fn = self._statics = _closed
        self.state = RunnerState.CLOSED


def _closed() -> NoReturn:
    raise GraphClosed("this graph was closed; capture it again")
