"""The interface between the engine core, which schedules, and the workers, which execute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from engine.scheduling.batch import Batch
from engine.worker.async_output import AsyncStepOutput
from engine.worker.capabilities import Capabilities
from engine.worker.worker import Worker
from graph_cache.core.cache import GraphCache


class Executor(Protocol):
    """The workers of one engine, one per rank. Used from one thread.

    The core reads `capabilities` and `graphs`, and calls the methods. Workers may be anywhere: the core and the Worker
    assume neither processes of this host nor pipes. Every operation reaches all ranks in the order of the calls. After
    an EngineDead the executor can only be closed.

    An executor over Ray would place one actor per GPU that holds a Worker, give `WorkerStart.join` a rendezvous that
    all hosts reach, and implement:

    - `submit`: prepare on rank 0, send the StepInput to the other actors without waiting, execute on rank 0.
    - `call`: the same for any method of Worker.
    - `update_weights`: put the tensors into the object store, stage on every actor, then commit or discard everywhere.
    - `check`: raise EngineDead once an actor has died.
    """

    capabilities: Capabilities
    graphs: GraphCache
    """The graph cache whose plans all ranks follow, for reports and to decide what is captured when."""

    worker: Worker
    """The worker in this process, for tests and benchmarks. The core doesn't use it."""

    @property
    def pids(self) -> Sequence[int]:
        """The process ids of the other ranks, in order of rank from 1."""
        ...

    def submit(self, batch: Batch) -> AsyncStepOutput:
        """Enqueue a step on every rank and return at once; rank 0's results arrive later. After an error: `recover`."""
        ...

    def recover(self, error: BaseException) -> None:
        """Make the workers usable after a step that failed with `error`.

        Raises EngineDead if that is not possible: with several ranks, the step may have succeeded on the others.
        """
        ...

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of Worker on every rank and return rank 0's result.

        With several ranks, any error ends them all and raises EngineDead.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Write (Hugging Face name, whole tensor) pairs in place on all ranks or on none; return how many.

        Raises WeightUpdateError if any rank refuses; the old weights stay in use on all of them.
        """
        ...

    def load_weights(self, *paths: str) -> int:
        """As `update_weights`, from safetensors files or folders of them that every rank can read."""
        ...

    def check(self) -> None:
        """Raise EngineDead if a rank is lost."""
        ...

    def close(self) -> None:
        """Close all workers. Closing twice does nothing."""
        ...
