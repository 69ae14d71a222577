"""A process group over which a trainer in other processes sends weights to an engine.

The trainer is rank 0 and each engine another rank. The group is made as SGLang, slime, AReaL and OpenRLHF make theirs
(a TCP store at the trainer's address, the group's name as a prefix), so that their trainers can join it. They broadcast
tensors and call no other collective, and neither does this class. Tensors are sent one by one, or packed: several in
one buffer of bytes, which saves collectives.

A trainer uses `WeightGroup.join(..., rank=0)` and `send`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import RequestError, WeightUpdateError
from engine.utils.daemon_thread import in_background

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 300.0
CLOSE_SECONDS = 1.0  # for which a trainer that leaves waits for the others
PACKED_BYTES = 1 << 30  # vLLM's
BACKENDS = ("gloo", "nccl")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8,
                  torch.int8, torch.int32, torch.int64)
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def tensor_specs(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Return the specs of parallel lists, as trainers send them. Raises RequestError that names the wrong entry."""
    if not len(names) == len(dtypes) == len(shapes):
        raise RequestError(
            f"found {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} shapes: give one of each for a "
            "tensor",
            param="names",
        )
    specs = []
    for index, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        found = DTYPES.get(dtype.removeprefix("torch."))
        if found is None:
            raise RequestError(
                f"dtype_names[{index}]={dtype[:80]!r} is not supported: use one of {', '.join(DTYPES)}",
                param="dtype_names",
            )
        if any(size < 0 for size in shape):
            raise RequestError(f"shapes[{index}]={list(shape)} has a negative size", param="shapes")
        specs.append(TensorSpec(name, found, tuple(shape)))
    return specs


class WeightGroup:
    """One group. Calls block until the other side makes the matching call, at most for the timeout.

    Not thread-safe. After an error the group can't be used: `close` it and join another.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, device: torch.device):
        self._group, self._store, self._device = group, store, device
        # Steps of the engine use the default stream, and must not wait for a trainer behind a transfer.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @classmethod
    def join(
        cls,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        name: str = "weights",
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        timeout: float = TIMEOUT_SECONDS,
    ) -> WeightGroup:
        """Join the group `name` at the trainer's address.

        Over gloo this blocks until all `world_size` processes have joined. NCCL connects them in the first transfer;
        joining then waits for the trainer alone, which waits for all. `device` is where received tensors are stored,
        and those to send are. Raises WeightUpdateError if the others don't join within `timeout` seconds, which is the
        limit of each transfer, too.
        """
        if backend not in BACKENDS:
            raise RequestError(f"backend={backend!r} is unknown: use one of {', '.join(BACKENDS)}", param="backend")
        device = torch.device(device)
        fitting = "nccl" if device.type == "cuda" else "gloo"
        if backend != fitting:
            raise RequestError(
                f"backend={backend!r} can't send tensors on {device.type}: use {fitting}", param="backend"
            )
        limit = timedelta(seconds=timeout)
        try:
            store = dist.PrefixStore(
                name, dist.TCPStore(address.strip("[]"), port, world_size, is_master=rank == 0, timeout=limit)
            )
            group = _new_group(store, rank, world_size, name, backend, limit)
        except (RuntimeError, ValueError) as error:
            raise WeightUpdateError(
                f"the weight group {name!r} at {address}:{port} was not joined by {world_size} processes within "
                f"{timeout:.0f} s: {error}"
            ) from error
        return cls(group, store, device)

    def send(self, tensors: Iterable[tuple[str, Tensor]], *, packed: bool = False, nbytes: int = PACKED_BYTES) -> None:
        """Send (name, tensor) pairs from rank 0, in the order of the specs that the receiver was told."""
        pairs = list(tensors)
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]
        if not packed:
            for _, tensor in pairs:
                self._broadcast(tensor.detach().to(self._device).contiguous())
            return
        for chunk in chunks(specs, nbytes):
            parts = [tensor.detach().to(self._device).contiguous().reshape(-1) for _, tensor in pairs[: len(chunk)]]
            del pairs[: len(chunk)]
            self._broadcast(torch.cat([part.view(torch.uint8) for part in parts]))

    def receive(
        self, specs: Sequence[TensorSpec], *, packed: bool = False, nbytes: int = PACKED_BYTES
    ) -> list[tuple[str, Tensor]]:
        """Receive the tensors of these specs into new memory. Raises WeightUpdateError if they don't arrive, or fit."""
        try:
            with torch.cuda.stream(self._stream):
                received = self._receive(specs, packed, nbytes)
            if self._stream is not None:
                self._stream.synchronize()
                for _, tensor in received:
                    tensor.record_stream(torch.cuda.default_stream(self._device))  # which reads it
            return received
        except RuntimeError as error:
            is_cpu = self._device.type == "cpu"  # whose allocator raises no OutOfMemoryError
            if not is_cpu and not isinstance(error, torch.OutOfMemoryError):
                raise
            size = sum(spec.nbytes for spec in specs) / 2**30
            advice = "lower gpu_memory_utilization, or release the KV cache during the update"
            raise WeightUpdateError(
                f"no room for {size:.2f} GiB of new weights beside the old ones: "
                f"{'check the shapes, or send files' if is_cpu else advice}"
            ) from error

    def _receive(self, specs: Sequence[TensorSpec], packed: bool, nbytes: int) -> list[tuple[str, Tensor]]:
        received: list[tuple[str, Tensor]] = []
        if not packed:
            for spec in specs:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                self._broadcast(tensor)
                received.append((spec.name, tensor))
            return received
        for chunk in chunks(specs, nbytes):
            buffer = torch.empty(sum(spec.nbytes for spec in chunk), dtype=torch.uint8, device=self._device)
            self._broadcast(buffer)
            start = 0
            for spec in chunk:
                part = buffer[start : start + spec.nbytes]
                if part.storage_offset() % spec.dtype.itemsize:
                    part = part.clone()  # views must be aligned
                received.append((spec.name, part.view(spec.dtype).view(spec.shape)))
                start += spec.nbytes
        return received

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.dtype.itemsize == 1:
            tensor = tensor.view(torch.uint8)  # gloo refuses float8
        try:
            self._group.broadcast(tensor, 0).wait()
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
        except RuntimeError as error:
            raise WeightUpdateError(f"a transfer over the weight group failed: {error}") from error

    def set_timeout(self, seconds: float) -> None:
        """Limit each later transfer."""
        limit = timedelta(seconds=seconds)
        dist.distributed_c10d._set_pg_timeout(limit, self._group)  # noqa: SLF001
        self._store.set_timeout(limit)  # the first transfer over NCCL waits for the trainer's id there

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Leave the group. Waits up to `seconds` for the others to leave.

        NCCL frees a communicator only when all of its processes leave, so the rest happens in a thread: a trainer may
        leave before it tells the engine to, or wait for the engine's answer first.
        """
        _forget(self._group)
        left = in_background(self._group.shutdown, "encore-weights-leave")
        wait([left], seconds)
        if left.done() and (error := left.exception()) is not None:
            logger.warning("a weight group did not end properly: %s", error)


def _new_group(
    store: dist.Store, rank: int, world_size: int, name: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group beside the default one, for which PyTorch has only this private function."""
    c10d: Any = dist.distributed_c10d
    with _waits_that_raise():
        group, _ = c10d._new_process_group_helper(  # noqa: SLF001
            world_size, rank, [], dist.Backend(backend), store, group_name=name, timeout=timeout
        )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}  # noqa: SLF001
    return group


def _forget(group: dist.ProcessGroup) -> None:
    """Remove a group from PyTorch's tables, so that its name can be used for another one before it has ended.

    `torch.distributed.destroy_process_group` does the same, after it has waited for the other processes.
    """
    c10d: Any = dist.distributed_c10d
    world = c10d._world  # noqa: SLF001
    tag = world.pg_to_tag.pop(group, None)
    for groups in {tag, ""} & world.tags_to_pg.keys():
        world.tags_to_pg[groups] = [other for other in world.tags_to_pg[groups] if other is not group]
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state):
        table.pop(group, None)
    c10d._unregister_process_group(group.group_name)  # noqa: SLF001


@contextmanager
def _waits_that_raise() -> Iterator[None]:
    """Make a group of NCCL in which `wait` blocks, and raises at the timeout or after the loss of the other side.

    Otherwise PyTorch's watchdog ends the whole process then, and the engine with it. NCCL groups read the variable when
    they are made.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def chunks(specs: Sequence[TensorSpec], nbytes: int) -> Iterator[list[TensorSpec]]:
    """Divide specs into the chunks that are packed together: each ends with the tensor that exceeds `nbytes`."""
    chunk: list[TensorSpec] = []
    size = 0
    for spec in specs:
        chunk.append(spec)
        size += spec.nbytes
        if size > nbytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
