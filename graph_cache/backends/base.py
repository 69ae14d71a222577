"""Backend interface: shared memory, capture, replay, and ordered copies to the host.

Both backends pass `tests/contract/`. Code outside this package does not depend on which one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from graph_cache.backends.interrupts import Interrupts
from graph_cache.backends.saved_states import SavedStates
from graph_cache.guards.reference import Reference
from graph_cache.utils.digest import Digest


class CapturedGraph(Protocol):
    """One captured graph. Only one thread at a time may replay it."""

    engine: str
    """Replay mechanism, for reports: "cuda_graph", "torchscript" or "loop"."""

    nbytes: int
    """Pool bytes that this graph needs (CPU) or that its capture added (CUDA)."""

    digest: Digest
    """Hash of what a replay runs."""

    def replay(self) -> None:
        """Run on the static buffers. Returns once enqueued (CUDA) or done (CPU)."""

    def close(self) -> None:
        """Release the graph's share of the pool. A closed graph cannot be replayed."""


class Memory(Protocol):
    """Memory shared by all graphs of a pool: sized by the largest of them, not by their sum."""

    def nbytes(self) -> int:
        """Return the bytes that the pool holds now."""

    def trim(self) -> None:
        """Return memory that no live graph needs to the system."""

    def release(self) -> int:
        """Give back the physical memory until `restore`, and return its bytes. Addresses stay, contents are lost.

        No graph may be replayed, captured or closed meanwhile. Only for memory that was made `releasable`.
        """

    def restore(self) -> None:
        """Undo `release`. Raises GraphError, and restores nothing, if there is no room."""


class Region(Protocol):
    """Memory that can be given back and restored while addresses stay, so that graphs which read it stay valid."""

    def allocation(self) -> AbstractContextManager[None]:
        """Return a context that places the tensors that this thread creates in it in this region."""

    def release(self, discarded: Sequence[torch.Tensor] = (), *, keeps: bool = True) -> int:
        """Give back the physical memory until `restore`, and return its bytes. A second call does nothing.

        Values are kept in host memory, except in `discarded`, contiguous tensors; without `keeps`, none are. The memory
        must not be read, written or freed meanwhile. Raises GraphError, and releases nothing, if the host has no
        room.
        """

    def restore(self) -> None:
        """Undo `release`. Tensors of `discarded` are zero.

        Raises GraphError, and restores nothing, if there is no room.
        """


class Backend(Protocol):
    """Capture and replay on one device.

    `warmup_runs`: eager runs required before a capture. `capture_runs`: whether a capture has the effects of a run.
    `interrupts`: whether captures may be given up; a backend whose captures are short never asks.
    """

    name: str
    interrupts: Interrupts
    warmup_runs: int
    capture_runs: bool
    device: torch.device
    default_generator: torch.Generator

    def new_memory(self, releasable: bool = False) -> Memory:
        """Return new shared memory, empty until a capture needs it."""

    def capture(
        self, fn: Callable[[], None], memory: Any, generators: Sequence[torch.Generator], reference: Reference | None
    ) -> CapturedGraph:
        """Run `fn` once and record it. Only `generators` may supply random numbers. `memory` is from `new_memory`.

        The caller holds the capture lock, has set the gradient mode, and restores the state afterwards. Given a
        reference, a backend that can compares a replay with it. Raises CaptureRefused for an operation that a graph
        cannot contain, and CaptureError for anything else. In both cases the device and its flags are restored.
        """

    def saved_states(self) -> SavedStates:
        """Return what lets the backward of one captured forward set random states that the forward saves."""

    def on_capture_stream(self) -> AbstractContextManager:
        """Return a context in which warm-up runs are ordered with captures."""

    def is_capturing(self) -> bool:
        """Return whether the calling thread is inside a capture."""

    def has_captured(self) -> bool:
        """Return whether the calling thread's capture may have recorded an operation that touches memory.

        True if unknown, as outside a capture.
        """

    def synchronize(self) -> None:
        """Wait for all enqueued work."""

    def order_streams(self) -> None:
        """Make the calling thread's work wait for work that earlier callers had enqueued before they called this."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias that does not own its memory: the pool may reuse it for later captures."""

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that asynchronous device copies can target."""

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Enqueue a copy after all work so far, and return a function that waits for it."""
