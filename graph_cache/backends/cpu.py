"""CPU backend: record the ATen calls of a run, and replay them on fixed memory without the model's Python.

Buffers and shapes are fixed and values are baked in at capture, so aliasing, stale inputs and values missing from the
key fail here as they would on a GPU. Every capture is checked against the eager run that it recorded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from graph_cache.backends.cpu_arena import Arena, Claim, plan_layout
from graph_cache.backends.cpu_digest import digest_of
from graph_cache.backends.cpu_host_reads import refuse_host_reads
from graph_cache.backends.cpu_program import Call, bind, loop_program, torchscript_program
from graph_cache.backends.cpu_tape import Tape, TapeRecorder
from graph_cache.backends.interrupts import Interrupts
from graph_cache.backends.saved_states import SavedStates
from graph_cache.errors import CaptureError, GraphClosed
from graph_cache.guards.reference import Reference
from graph_cache.utils.digest import Digest

logger = logging.getLogger(__name__)


class CpuGraph:
    """A tape bound to memory. Owns its claim on the arena; the program keeps the tensors that it reads alive."""

    def __init__(
        self, program: Callable[[], None], engine: str, claim: Claim, replay_lock: threading.Lock, digest: Digest
    ):
        self.engine, self.digest = engine, digest
        self.nbytes = claim.nbytes
        self._program: Callable[[], None] | None = program
        self._claim: Claim | None = claim
        self._replay_lock = replay_lock

    def replay(self) -> None:
        """Run the calls on the arena. Replays are serialised: all graphs of a pool use the same memory."""
        with self._replay_lock:
            if self._program is None:
                raise GraphClosed("this CPU graph was closed; capture it again")
            self._program()

    def close(self) -> None:
        """Drop the program, the tensors that it reads, and its claim on the arena."""
        with self._replay_lock:
            self._program = self._claim = None


class CpuBackend:
    """CPU implementation of `backends.base.Backend`."""

    name = "cpu"
    warmup_runs = 1
    capture_runs = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.default_generator = torch.default_generator
        self._replay_lock = threading.Lock()
        self._capturing_thread: int | None = None
        self._recorder: TapeRecorder | None = None  # of the capture in progress
        self._matches: dict[Hashable, bool] = {}  # whether out= overloads match, in captures that are checked
        self.interrupts = Interrupts()

    def new_memory(self, releasable: bool = False) -> Arena:
        return Arena()

    def saved_states(self) -> SavedStates:
        return SavedStates()

    def on_capture_stream(self) -> AbstractContextManager:
        return nullcontext()

    def is_capturing(self) -> bool:
        return self._capturing_thread == threading.get_ident()

    def has_captured(self) -> bool:
        recorder = self._recorder
        return recorder is None or not self.is_capturing() or recorder.touched_memory()

    def synchronize(self) -> None:
        """Do nothing: CPU operations are complete when they return."""

    def order_streams(self) -> None:
        """Do nothing: there are no streams."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # memory that outlives the run is kept outside the arena

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        target.copy_(source)
        return lambda: None

    def capture(
        self, fn: Callable[[], None], memory: Arena, generators: Sequence[torch.Generator], reference: Reference | None
    ) -> CpuGraph:
        """Record `fn`, place its intermediates in the arena, and check a replay against the eager run.

        Memory still referenced after the run (tensors that a forward saves for its backward, gradients) stays in place.
        """
        # Without a reference, this function itself must undo the run on an error.
        states = [] if reference is not None else [(generator, generator.get_state()) for generator in generators]
        is_checked = reference is not None and reference.is_known
        recorder = self._recorder = TapeRecorder(
            generators,
            can_undo=not is_checked,
            check=self.interrupts.check,
            matches=self._matches if reference is not None else None,
        )
        self._capturing_thread = threading.get_ident()
        try:
            with recorder, refuse_host_reads(recorder.may_read), recorder.observing_generators():
                fn()
                recorder.check_generators()
                recorder.check_refusals()
        except BaseException:
            recorder.undo()
            for generator, state in states:
                generator.set_state(state)
            raise
        finally:
            self._capturing_thread = self._recorder = None
        recorder.keep_live_buffers()
        if reference is not None and not is_checked:
            recorder.undo()  # the caller compares replays with eager runs
            reference = None
        if reference is not None and (mismatches := reference.differences()):
            raise CaptureError(
                f"two eager runs from the same inputs differ in {mismatches} outputs: the callable "
                "depends on the host, on earlier runs or on an unregistered generator"
            )
        checks = [] if reference is None else [reference]
        if reference is not None and not torch.is_grad_enabled() and _noise_matters(recorder.tape, reference):
            checks += self._noise_reference(fn, reference)  # not with grad: a second run would replace saved tensors
        offsets, need = plan_layout(recorder.tape.buffers, recorder.tape.kept)
        claim = memory.claim(need)
        self.interrupts.check()
        program, engine = self._build_program(bind(recorder.tape, claim, offsets), checks)
        return CpuGraph(program, engine, claim, self._replay_lock, digest_of(recorder.tape))

    def _noise_reference(self, fn: Callable[[], None], reference: Reference) -> list[Reference]:
        """Run `fn` again from noise, as a second reference: padding rows are all alike and hide some errors.

        Returns an empty list if the callable rejects noise. Integers may be indices, so they stay unchanged if memory
        that they address would not be restored, or if the callable rejects other ones.
        """
        for integers in (True, False) if reference.restores_all else (False,):
            reference.rewind()
            noisy = reference.with_noise(integers)
            try:
                self.interrupts.checking(fn)()
            except Exception as error:
                logger.debug("second check skipped, the callable rejects noise: %s", error)
                continue
            noisy.remember()
            return [noisy]
        return []

    def _build_program(self, calls: list[Call], checks: list[Reference]) -> tuple[Callable[[], None], str]:
        try:
            program = torchscript_program(calls)
            mismatches = self._count_mismatches(program, checks)
            if not mismatches:
                return program, "torchscript"
            logger.warning(
                "TorchScript replay differed from eager in %d outputs: replaying by a loop instead", mismatches
            )
        except Exception as error:  # its bindings raise various types for unsupported calls
            logger.warning("TorchScript cannot replay this capture, replaying by a loop instead: %s", error)
        program = loop_program(calls)
        if mismatches := self._count_mismatches(program, checks):
            raise CaptureError(f"replaying the recorded calls leaves {mismatches} outputs that differ from eager")
        return program, "loop"

    def _count_mismatches(self, program: Callable[[], None], checks: list[Reference]) -> int:
        """Return the number of outputs in which a replay differs from the eager runs."""
        mismatches = 0
        for reference in checks:
            self.interrupts.check()
            reference.rewind()
            with self._replay_lock:
                program()
            mismatches += reference.differences()
        return mismatches


def _noise_matters(tape: Tape, reference: Reference) -> bool:
    """Return whether a run from noise could differ from the recorded run.

    If integers stay as they are, it can't where the run overwrites all floating-point numbers before it reads them.
    """
    return reference.restores_all or tape.reads(one for one in reference.statics() if one.is_floating_point())
