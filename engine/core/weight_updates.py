"""A trainer's updates of the weights of a running loop: in parts, with versions, and proofs of what is there.

Each command runs on the loop's thread between two steps and returns plain values.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.core.loop import EngineLoop
from engine.core.pending import Pending
from engine.core.weight_groups import WeightGroups
from engine.distributed.gpu_memory import open_weights
from engine.errors import RequestError, WeightUpdateError
from engine.protocol.memory_handles import SharedWeights
from engine.utils.daemon_thread import in_background

logger = logging.getLogger(__name__)


class _Parts:
    """The parts of an update that was started: paths of files, or tensors."""

    def __init__(self) -> None:
        self.parts: list[str | list[tuple[str, Tensor]]] = []
        self._announced: list[Future[Any]] = []
        self._num_taken = 0

    def announce(self, pending: Pending) -> Pending:
        """Count a part as arriving until it is finished or has failed."""
        self._announced.append(pending.future)

        def finish(tensors: Any) -> Any:
            self._num_taken += 1
            return pending.finish(tensors)

        return Pending(pending.future, finish)

    @property
    def num_arriving(self) -> int:
        failed = sum(future.done() and future.exception() is not None for future in self._announced)
        return len(self._announced) - failed - self._num_taken


class WeightUpdates:
    """Commands about the weights of one loop; see Operations."""

    def __init__(self, loop: EngineLoop):
        self._loop = loop
        self.groups = WeightGroups(loop.executor.capabilities.device, self._num_ranks)
        self._staged: _Parts | None = None  # the update that was started; None: there is none
        self._numbers = itertools.count(1)

    # ---- updates ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin an update in several parts, which becomes visible in `finish`. Drops an earlier one without an end."""
        if self._staged is not None and self._staged.parts:
            logger.warning("a weight update of %d parts was never finished, and is dropped", len(self._staged.parts))
        self._staged = _Parts()

    def load(self, path: str, version: str | None = None) -> tuple[int, str]:
        """Update the weights from a safetensors file or a folder; return the number of tensors and the version.

        Within an update that was started, it only becomes a part of that, and the number is 0. Without a version, the
        new weights get the name `update-N`. Raises WeightUpdateError; the old weights stay in use.
        """
        if self._staged is None:
            version = version or self._next_version()
            return self._loop.load_weights(path, version), version
        self._check_version(version)
        if not Path(path).exists():
            raise WeightUpdateError(f"{path!r} does not exist: give a file or folder on the server's machine")
        self._staged.parts.append(path)
        return 0, self._loop.weight_version

    def receive(
        self,
        group: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        packed: bool | None = None,
        version: str | None = None,
    ) -> Pending:
        """Update the weights with tensors that a trainer sends over a group; see `load` and WeightGroups.receive.

        Steps go on until all tensors have arrived.
        """
        self._check_version(version)
        parts = self._staged
        pending = self.groups.receive(
            group, names, dtypes, shapes, packed, lambda tensors: self._take(tensors, version, parts)
        )
        return pending if parts is None else parts.announce(pending)

    def open(self, shared: SharedWeights, version: str | None = None) -> Pending:
        """Update the weights with tensors in a trainer's GPU memory; see `load` and `open_weights`.

        Steps go on until all are opened. The trainer may change its tensors when it has the result: a part of an update
        is a copy.
        """
        self._check_version(version)
        device, parts = self._loop.executor.capabilities.device, self._staged

        def take(tensors: list[tuple[str, Tensor]]) -> tuple[int, str]:
            try:
                if parts is None and self._num_ranks == 1:
                    return self._take(tensors, version, parts)
                return self._take([(name, tensor.clone()) for name, tensor in tensors], version, parts)
            except torch.OutOfMemoryError as error:
                raise WeightUpdateError(
                    "no room for a copy of these weights beside the old ones: lower gpu_memory_utilization, or send "
                    "the update whole, without /start_weight_update"
                ) from error
            finally:
                torch.cuda.current_stream(device).synchronize()  # the copies have ended
                tensors.clear()  # releases the trainer's memory

        pending = Pending(in_background(lambda: open_weights(shared, device), "encore-weights-memory"), take)
        return pending if parts is None else parts.announce(pending)

    def _take(self, tensors: list[tuple[str, Tensor]], version: str | None, parts: _Parts | None) -> tuple[int, str]:
        """Write the tensors, or keep them as one of `parts`, the update that was started when they were announced."""
        if parts is None:
            version = version or self._next_version()
            return self._loop.update_weights(tensors, version), version
        if parts is not self._staged:
            raise WeightUpdateError(
                "another /start_weight_update dropped the update that these tensors are a part of, while they arrived: "
                "send the whole update again"
            )
        parts.parts.append(tensors)
        return 0, self._loop.weight_version

    def finish(self, version: str | None = None) -> tuple[int, str]:
        """Write all parts of the update that was started, or none; return the number of tensors and the version.

        The update has ended afterwards, also if it fails; only while the weights sleep it stays, to be finished later.
        Without parts, only the version changes, if one is given.
        """
        if self._staged is None:
            raise RequestError("no weight update was started: call /start_weight_update first")
        if count := self._staged.num_arriving:
            raise RequestError(f"{count} parts of this update are still arriving: wait for the answers of their calls")
        if self._staged.parts:
            self._loop.sleep.check_weights()  # the update is not lost: it can be finished after waking
        parts, self._staged = self._staged.parts, None
        if parts:
            version = version or self._next_version()
            return self._write(parts, version), version
        if version is not None:
            self._loop.rename_weights(version)
        return 0, self._loop.weight_version

    def _write(self, parts: Sequence[str | list[tuple[str, Tensor]]], version: str) -> int:
        paths = [part for part in parts if isinstance(part, str)]
        received = [part for part in parts if not isinstance(part, str)]
        if paths and received:
            raise WeightUpdateError(
                "the parts of this update came from files and as tensors: send all parts of an update one way"
            )
        if paths:
            return self._loop.load_weights(paths, version)
        return self._loop.update_weights([pair for part in received for pair in part], version)

    def _check_version(self, version: str | None) -> None:
        if self._staged is not None and version is not None:
            raise RequestError(
                "weight_version is set by /finish_weight_update in an update that was started: remove it here",
                param="weight_version",
            )

    def randomize(self) -> str:
        """Overwrite all weights with random values, and return their version. For tests of a weight transfer."""
        self._loop.sleep.check_weights()
        self._loop.executor.call("randomize_weights")
        version = f"random-{next(self._numbers)}"
        self._loop.weights_changed(version)
        return version

    def _next_version(self) -> str:
        return f"update-{next(self._numbers)}"

    # ---- reading ---------------------------------------------------------------------------------------------------

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each tensor by Hugging Face name; see Worker.weight_checksums."""
        self._check_whole("checksums")
        return self._loop.executor.call("weight_checksums")

    def values(self, name: str, limit: int) -> list:
        """Return the first `limit` entries of a tensor's first dimension as (nested) lists of floats."""
        self._check_whole("get_weights_by_name")
        return self._loop.executor.call("weight_values", name, limit)

    def _check_whole(self, what: str) -> None:
        """Raise RequestError if the weights are split over several processes, or can't be read after a sleep."""
        self._loop.sleep.check_readable()
        if self._num_ranks > 1:
            raise RequestError(
                f"{what}: the weights are split over {self._num_ranks} processes, of which none has whole tensors"
            )

    @property
    def _num_ranks(self) -> int:
        return 1 + len(self._loop.executor.pids)
