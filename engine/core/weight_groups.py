"""The process groups over which trainers send weights to this loop.

A group is joined, and tensors are received, in a thread: steps go on meanwhile. Received tensors lie beside the weights
until the loop's thread writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.core.pending import Pending
from engine.distributed.weight_group import PACKED_BYTES, TIMEOUT_SECONDS, WeightGroup, tensor_specs
from engine.errors import RequestError, WeightUpdateError
from engine.utils.daemon_thread import in_background
from graph_cache.utils.validation import did_you_mean


class _Joined(NamedTuple):
    """A group, and how tensors are sent over it unless a call says otherwise; see WeightGroups.join."""

    group: WeightGroup
    packed: bool
    packed_bytes: int


class WeightGroups:
    """The groups of one loop, by name. Its methods run on the loop's thread."""

    def __init__(self, device: torch.device, num_ranks: int = 1):
        self._device, self._num_ranks = device, num_ranks
        self._groups: dict[str, _Joined] = {}
        self._busy: dict[str, Future[Any]] = {}  # by name, the thread that uses the group or joins it
        # By name, the last call that joins, until it has joined. One that failed stays, and hinders no other.
        self._joining: dict[str, object] = {}

    def join(
        self,
        name: str,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        backend: str | None,
        timeout: float | None,
        packed: bool = False,
        packed_bytes: int = PACKED_BYTES,
    ) -> Pending:
        """Join a trainer's group as rank `rank_offset`; see WeightGroup.join.

        A group of that name is left, and a call that still waits for its trainer is given up: the trainer may have been
        started again. `packed`: whether tensors come packed, in chunks of more than `packed_bytes` bytes.

        The engine joins with one process, also with several ranks. Other engines may have the ranks after it.
        """
        if world_size <= rank_offset or (self._num_ranks > 1 and world_size == rank_offset + self._num_ranks):
            raise RequestError(
                f"world_size={world_size} is invalid with rank_offset={rank_offset}: this engine joins with one "
                f"process, also with several ranks, so give {rank_offset + 1}, or more for other engines",
                param="world_size",
            )
        if name not in self._joining:
            self._require_free(name)
        self._busy.pop(name, None)
        self.leave(name, missing_ok=True)
        attempt = self._joining[name] = object()
        backend = backend or ("nccl" if self._device.type == "cuda" else "gloo")

        def require_wanted(group: WeightGroup) -> None:
            if self._joining.get(name) is not attempt:
                group.close(0.0)
                raise WeightUpdateError(
                    f"another call joined the weight group {name!r} meanwhile: this one was given up"
                )

        def run() -> WeightGroup:
            group = WeightGroup.join(
                address,
                port,
                rank=rank_offset,
                world_size=world_size,
                name=name,
                backend=backend,
                device=torch.device("cpu") if backend == "gloo" else self._device,
                timeout=timeout or TIMEOUT_SECONDS,
            )
            require_wanted(group)
            return group

        def finish(group: WeightGroup) -> None:
            require_wanted(group)
            del self._joining[name]
            self._groups[name] = _Joined(group, packed, packed_bytes)

        return self._start(name, run, finish)

    def receive(
        self,
        name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        packed: bool | None,
        finish: Callable[[list[tuple[str, Tensor]]], Any],
    ) -> Pending:
        """Receive tensors, in this order, and call `finish` with them on the loop's thread.

        `packed`: all in one buffer (True), or one by one (False); None: as the group was joined for. If they don't
        arrive, the group is left, since nothing can follow on it.
        """
        specs = tensor_specs(names, dtypes, shapes)
        joined = self._groups.get(name)
        if joined is None:
            raise RequestError(
                f"no weight group {name!r} was joined{did_you_mean(name, self._groups)}: join it first",
                param="group_name",
            )
        self._require_free(name)
        is_packed, nbytes = (joined.packed, joined.packed_bytes) if packed is None else (packed, sys.maxsize)

        def run() -> list[tuple[str, Tensor]]:
            try:
                return joined.group.receive(specs, packed=is_packed, nbytes=nbytes)
            except BaseException:
                self._groups.pop(name, None)
                joined.group.close()
                raise

        return self._start(name, run, finish)

    def leave(self, name: str, *, missing_ok: bool = False) -> None:
        """Leave a group. Raises RequestError if there is none of that name, or if it is in use."""
        self._require_free(name)
        joined = self._groups.pop(name, None)
        if joined is not None:
            joined.group.close(0.0)  # the trainer may wait for the answer of this call before it leaves
        elif not missing_ok:
            raise RequestError(f"no weight group {name!r} was joined", param="group_name")

    def _start(self, name: str, run: Callable[[], Any], finish: Callable[[Any], Any]) -> Pending:
        self._busy[name] = in_background(run, f"encore-weights-{name}")
        return Pending(self._busy[name], finish)

    def _require_free(self, name: str) -> None:
        busy = self._busy.get(name)
        if busy is not None and not busy.done():
            raise RequestError(f"the weight group {name!r} is in use by an earlier call: wait for its answer")
