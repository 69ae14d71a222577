"""Graphs without a GPU: the ATen calls of a run, replayed on fixed memory without running the model's Python.

Fixed buffers, fixed shapes, values baked in at capture: aliasing, stale inputs and forgotten keys fail here as they
would on a GPU. Every capture is checked against the eager run that it recorded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from graph_cache.backends.cpu_arena import Arena, Claim, plan_layout
from graph_cache.backends.cpu_program import Call, bind, loop_program, torchscript_program
from graph_cache.backends.cpu_tape import TapeRecorder
from graph_cache.errors import CaptureError, GraphClosed
from graph_cache.reference import Reference

logger = logging.getLogger(__name__)


class CpuGraph:
    """A bound tape. Owns its claim on the arena and keeps what it reads alive."""

    def __init__(self, program: Callable[[], None], engine: str, claim: Claim, external: list[torch.Tensor],
                 replay_lock: threading.Lock):
        self.engine = engine
        self.nbytes = claim.nbytes
        self._program: Callable[[], None] | None = program
        self._claim: Claim | None = claim
        self._external = external
        self._replay_lock = replay_lock

    def replay(self) -> None:
        """Run the calls on the arena. One replay at a time: all graphs of a pool use the same memory."""
        with self._replay_lock:
            if self._program is None:
                raise GraphClosed("this CPU graph was closed; capture it again")
            self._program()

    def close(self) -> None:
        """Drop the program, what it read, and its claim on the arena."""
        with self._replay_lock:
            self._program = self._claim = None
            self._external = []


class CpuBackend:
    """The CPU's way to capture and replay; see `backends.base.Backend` for the contract."""

    name = "cpu"
    warmup_runs = 1

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._replay_lock = threading.Lock()
        self._capturing_thread: int | None = None

    def new_memory(self) -> Arena:
        return Arena()

    def on_capture_stream(self) -> AbstractContextManager:
        return nullcontext()

    def is_capturing(self) -> bool:
        return self._capturing_thread == threading.get_ident()

    def synchronize(self) -> None:
        """Everything on a CPU is done when its call returns."""

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        target.copy_(source)
        return lambda: None

    def capture(self, fn: Callable[[], None], memory: Arena, reference: Reference) -> CpuGraph:
        """Record `fn`, lay its intermediates out in the arena, and check a replay against the eager run."""
        recorder = TapeRecorder(reference.generators)
        self._capturing_thread = threading.get_ident()
        try:
            with torch.inference_mode(), recorder:
                fn()
        finally:
            self._capturing_thread = None
        if faults := reference.differences():
            raise CaptureError(f"two eager runs from the same inputs differ in {faults} outputs: something in the "
                               "callable depends on the host, on earlier runs or on an unregistered generator")
        offsets, need = plan_layout(recorder.tape.buffers)
        claim = memory.claim(need)
        calls = bind(recorder.tape, claim, offsets)
        program, engine = self._fastest_that_agrees(calls, reference)
        return CpuGraph(program, engine, claim, recorder.tape.external, self._replay_lock)

    def _fastest_that_agrees(self, calls: list[Call], reference: Reference) -> tuple[Callable[[], None], str]:
        try:
            program = torchscript_program(calls)
            faults = self._trial(program, reference)
            if not faults:
                return program, "torchscript"
            logger.warning("fast replay differed from eager in %d outputs: replaying by a loop instead", faults)
        except RuntimeError as error:
            logger.warning("fast replay can't hold this capture, replaying by a loop instead: %s", error)
        program = loop_program(calls)
        if faults := self._trial(program, reference):
            raise CaptureError(f"replaying the recorded calls leaves {faults} outputs other than eager did")
        return program, "loop"

    def _trial(self, program: Callable[[], None], reference: Reference) -> int:
        reference.rewind()
        with self._replay_lock:
            program()
        return reference.differences()
