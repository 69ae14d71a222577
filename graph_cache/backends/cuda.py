"""CUDA graphs. The only file that captures on a GPU.

Captures use the thread-local mode, so that another thread's allocation or synchronisation cannot invalidate them. All
run on one capture stream into one memory pool, so that graphs share memory the size of the largest.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graph_cache.backends.cuda_digest import Node, captured_nodes, digest_of
from graph_cache.backends.cuda_generators import CudaSavedStates
from graph_cache.backends.cuda_nodes import has_nodes, pageable_copies
from graph_cache.backends.cuda_region import CudaRegion, segments_of
from graph_cache.backends.interrupts import Interrupts
from graph_cache.errors import CaptureError, CaptureRefused, GraphClosed
from graph_cache.guards.library_state import weight_update_flag
from graph_cache.guards.reference import Reference

logger = logging.getLogger(__name__)

CAPTURE_SEEDS = itertools.count(0x5EED_CAB7_0DE5_1234)  # that no code sets
# Parts of the error texts of the driver (CUDA errors 900 to 908) and PyTorch for what can't be captured.
REFUSALS = (
    "stream is capturing", "during capture", "capture sequence", "capture was not ended", "capturing stream",
    "uncaptured work", "stream depend on a capturing", "cudaErrorStreamCapture", "graph capture", "captures_underway",
    "graph is capturing", "while capturing", "capturing stage", "is being captured",
)  # fmt: skip
LEGACY_STREAM_ERROR = "legacy stream depend on a capturing"
LEGACY_STREAM_REMEDY = (
    "an operation uses the default stream, which a capture cannot wait for. A data-parallel wrapper accumulates "
    "gradients on the stream on which it was created; if that is the cause, create it on another: `stream = "
    "torch.cuda.Stream(); stream.wait_stream(torch.cuda.current_stream()); with torch.cuda.stream(stream): "
    "model = DistributedDataParallel(…)`, and torch.cuda.current_stream().wait_stream(stream). "
)


class CudaMemory:
    """One private pool of the caching allocator for all graphs of a GraphPool.

    PyTorch retires a pool with its last graph and then rejects its handle, so a new handle is taken when no graph is
    left. Graphs that are alive at the same time always share one pool. `releasable`: the pool is that of a CudaRegion.
    """

    def __init__(self, device: torch.device, releasable: bool = False):
        self._device = device
        self._releasable = releasable
        self._live_graphs = 0
        self.renew()

    def add_graph(self) -> None:
        """Count a new graph in the pool."""
        self._live_graphs += 1

    def remove_graph(self) -> None:
        """Count a destroyed graph; renew the pool after the last."""
        self._live_graphs -= 1
        if self._live_graphs == 0:
            self.renew()

    def renew(self) -> None:
        """Use a new pool for further captures."""
        self._region = CudaRegion(self._device) if self._releasable else None
        self.id: Any = torch.cuda.graph_pool_handle() if self._region is None else self._region.id
        self._segment_bytes = 0

    def nbytes(self) -> int:
        """Return the bytes of the segments that the allocator held for this pool after its last capture."""
        return self._segment_bytes

    def growth(self) -> int:
        """Measure the pool again (walks its segments), and return the growth in bytes."""
        before, self._segment_bytes = self._segment_bytes, sum(part["total_size"] for part in segments_of(self.id))
        return max(0, self._segment_bytes - before)

    def trim(self) -> None:
        """Return segments that no live graph uses to the driver."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        if self._live_graphs:
            self.growth()  # memory that only an evicted graph used has left the pool

    def release(self) -> int:
        """See Memory. Replays write all that they read in the pool, so its contents need not be kept."""
        return 0 if self._region is None else self._region.release(keeps=False)

    def restore(self) -> None:
        """See Memory."""
        if self._region is not None:
            self._region.restore()


class CudaBackendGraph:
    """One `torch.cuda.CUDAGraph`."""

    engine = "cuda_graph"

    def __init__(self, graph: torch.cuda.CUDAGraph, memory: CudaMemory, nodes: list[Node]):
        self.nbytes = memory.growth()
        self.digest = digest_of(nodes)
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._memory = memory
        # Bound without a wrapper, since a training step replays two graphs per layer. Enqueues on the current stream.
        self.replay: Callable[[], None] = graph.replay
        memory.add_graph()

    def close(self) -> None:
        """Destroy the graph; its memory returns to the pool."""
        if self._graph is not None:
            self.replay = _closed
            self._graph.reset()
            self._graph = None
            self._memory.remove_graph()


def _closed() -> None:
    raise GraphClosed("this CUDA graph was closed; capture it again")


def _settle_attention_priority(device: torch.device) -> None:
    """Let PyTorch choose a kernel for fused attention, which changes its priority of kernels the first time.

    That priority is among `settings`, so the first step with attention would count as one with other settings.
    """
    tiny = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(tiny, tiny, tiny)  # noqa: SLF001


class CudaBackend:
    """CUDA implementation of `backends.base.Backend`."""

    name = "cuda"
    capture_runs = False
    warmup_runs = 2  # the first run loads modules and selects algorithms, which must not happen in a capture

    def __init__(self, device: torch.device):
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.default_generator = torch.cuda.default_generators[self.device.index]
        self.stream = torch.cuda.Stream(self.device)
        self.interrupts = Interrupts()
        self._scratch = torch.zeros(1, device=self.device)
        self._last_stream: torch.cuda.Stream | None = None  # of the last caller of `order_streams`
        _settle_attention_priority(self.device)

    def new_memory(self, releasable: bool = False) -> CudaMemory:
        return CudaMemory(self.device, releasable)

    def saved_states(self) -> CudaSavedStates:
        return CudaSavedStates(self.default_generator)

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Order the block after the caller's stream, and the caller's stream after the block."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def has_captured(self) -> bool:
        # Query the driver only from the capturing thread, or one that it waits for: the graph is being modified.
        return not self.is_capturing() or has_nodes(self.stream.cuda_stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def order_streams(self) -> None:
        current, last = torch.cuda.current_stream(self.device), self._last_stream
        if last is not None and last != current:
            current.wait_stream(last)
        self._last_stream = current

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = torch._C._construct_storage_from_data_pointer(
            tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes()
        )
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(self.device))
        return arrived.synchronize

    def capture(
        self,
        fn: Callable[[], None],
        memory: CudaMemory,
        generators: Sequence[torch.Generator],
        reference: Reference | None,
    ) -> CudaBackendGraph:
        """Capture `fn` on the capture stream into `memory`."""
        torch.cuda.synchronize(self.device)
        with self.on_capture_stream(), self._refusing_seeds(generators), weight_update_flag(None):
            torch.cuda.current_blas_handle()  # one per thread: made in a capture, it would end it
            graph = self._begin(memory, generators)
            try:
                fn()
                self.refuse_copies_of_the_host()
                nodes = self._nodes()
                graph.capture_end()
            except BaseException as error:
                self._abandon(graph, memory, generators)
                if isinstance(error, RuntimeError):
                    error_type = CaptureRefused if any(word in str(error) for word in REFUSALS) else CaptureError
                    remedy = LEGACY_STREAM_REMEDY if LEGACY_STREAM_ERROR in str(error) else ""
                    raise error_type(f"the driver refused the capture: {remedy}{error}") from error
                raise
        torch.cuda.synchronize(self.device)
        return CudaBackendGraph(graph, memory, nodes)

    @contextmanager
    def _refusing_seeds(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Give all generators a new seed within the block, so that PyTorch refuses others in a capture.

        It accepts a seed that a generator has already, and a replay would not begin at that seed again.
        """
        states = [(generator, generator.get_state()) for generator in {self.default_generator, *generators}]
        seed = next(CAPTURE_SEEDS)
        for generator, _ in states:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)

    def _begin(self, memory: CudaMemory, generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
        """Begin a capture. If the allocator rejects the current pool, as after some failures, use a new one."""
        failure: RuntimeError | None = None
        for _ in range(2):
            graph = self._new_graph(generators)
            try:
                graph.capture_begin(pool=memory.id, capture_error_mode="thread_local")
                return graph
            except RuntimeError as error:
                self._abandon(graph, memory, generators)
                failure = error
                logger.warning("the allocator rejected the graph pool; using a new one: %s", error)
                memory.renew()
        raise CaptureError(f"the capture could not begin: {failure}") from failure

    def refuse_copies_of_the_host(self) -> None:
        """Raise CaptureRefused if the capture in progress on the current stream copies pageable host memory."""
        if copies := pageable_copies(torch.cuda.current_stream(self.device).cuda_stream):
            raise CaptureRefused(
                f"it copies {', '.join(copies)}: pageable memory of the host, which may be freed or changed when the "
                "graph is replayed. Copy from pinned memory that outlives the graph. If a library makes the copy, "
                "another shape or implementation may avoid it: cuDNN attention copies in its backward at sequence "
                "lengths that are not a multiple of 128"
            )

    def _nodes(self) -> list[Node]:
        """Return the nodes of the capture in progress; none if the driver can't report them."""
        try:
            return captured_nodes(torch.cuda.current_stream(self.device).cuda_stream)
        except CaptureError as error:
            logger.warning("a graph has no digest: %s", error)
            return []

    def _new_graph(self, generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, memory: CudaMemory, generators: Sequence[torch.Generator]) -> None:
        """End a failed capture so that the device, its allocator and its generators are as before.

        A capture that ends in an error leaves its generators in capture mode, in which every later use fails. An empty
        capture that succeeds resets them.
        """

        def stop_recording() -> None:
            torch._C._cuda_endAllocateToPool(self.device.index, memory.id)

        for step in (graph.capture_end, stop_recording, graph.reset, lambda: torch.cuda.synchronize(self.device)):
            try:
                step()
            except RuntimeError as secondary:  # repeats the capture's failure; the caller raises the original
                logger.debug("while abandoning a capture: %s", secondary)
        empty_graph = self._new_graph(generators)
        empty_graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        self._scratch.zero_()
        empty_graph.capture_end()
        empty_graph.reset()
