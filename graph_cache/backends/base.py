"""What a device must offer to hold graphs: memory shared by all of them, capture, replay, ordered copies to the host.

Both backends pass `tests/contract/`. Nothing above this file knows which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from graph_cache.reference import Reference


class CapturedGraph(Protocol):
    """One captured graph, replayed by one thread at a time."""

    engine: str
    """How it replays, for reports: "cuda_graph", "torchscript" or "loop"."""

    nbytes: int
    """Bytes of the pool that this graph needs (CPU) or that its capture added (CUDA)."""

    def replay(self) -> None:
        """Run on the static buffers; returns when enqueued (CUDA) or done (CPU)."""

    def close(self) -> None:
        """Give the graph's claim on the pool back. A closed graph can't be replayed."""


class Memory(Protocol):
    """Memory that all graphs of a pool share: as large as the largest of them, not their sum."""

    def nbytes(self) -> int:
        """Bytes that the pool holds now."""

    def trim(self) -> None:
        """Return what no live graph needs to the system."""


class Backend(Protocol):
    """A device's way to capture and replay.

    `warmup_runs`: eager runs wanted before a capture. `capture_runs`: whether a capture has the effects of a run.
    """

    name: str
    warmup_runs: int
    capture_runs: bool
    device: torch.device
    default_generator: torch.Generator

    def new_memory(self) -> Memory:
        """Fresh shared memory, empty until a capture needs it."""

    def capture(
        self, fn: Callable[[], None], memory: Memory, generators: Sequence[torch.Generator], reference: Reference | None
    ) -> CapturedGraph:
        """Run `fn` once and keep what it did, drawing from these generators only.

        The caller holds the capture lock, has set the gradient mode, and takes the state back afterwards. With a
        reference, a backend that can compares a replay with it. Raises CaptureRefused for an operation that a graph
        can't hold, CaptureError for anything else; either way the device and its flags are as before.
        """

    def on_capture_stream(self) -> AbstractContextManager:
        """Context in which warm-up runs are ordered with captures."""

    def is_capturing(self) -> bool:
        """Whether the calling thread is inside a capture."""

    def has_captured(self) -> bool:
        """Whether the capture that the calling thread is inside of may have recorded anything that touches memory.

        True where that isn't known, as outside of a capture.
        """

    def synchronize(self) -> None:
        """Wait for everything enqueued."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without a claim on it: the pool may give it to later captures."""

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host that copies from the device may target without a wait."""

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Enqueue a copy after all work so far; the returned function waits until it has arrived."""
