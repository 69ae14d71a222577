"""Messages from rank 0 to the worker processes.

A message is a pickle. The data of its arrays (numpy, and CPU tensors through `SharedTensor`) is sent beside it: with
the pickle if it is small, else in shared memory that every receiver maps. That memory has no name: it is freed when the
last process that uses it drops it or dies.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from engine.utils.processes.child import anonymous_file
from engine.worker.startup import WorkerPlan

SHARED_BYTES = 16 << 10  # a message with this much array data or more sends it in shared memory
ALIGNMENT = 64
MAX_PARTS = 512  # buffers per writev; Linux accepts 1024


class StartRank(NamedTuple):
    """The first message to a worker. `log` is rank 0's pickled log formatter and its level."""

    plan: WorkerPlan
    rank: int
    rendezvous: str
    log: tuple[bytes, int]


class BuildWorker(NamedTuple):
    """The second message, when all ranks have loaded their weights."""

    num_pages: int


class RankState(NamedTuple):
    """What is equal on all ranks before a call: ranks that differ would combine unrelated values in collectives.

    - steps, tokens: the number of steps whose results rank 0 has read, and the hash of their tokens.
    - counters: `Worker.state`.
    """

    steps: int
    tokens: int
    counters: tuple[int, ...]


class Call(NamedTuple):
    """Every later message: a method of Worker to call. None instead of a Call stops the worker.

    - number: of this call, from 0.
    - state: of rank 0, before the call.
    - has_reply: whether the worker answers with a Reply.
    """

    number: int
    state: RankState
    method: str
    args: tuple
    has_reply: bool = False


# ---- tensors -------------------------------------------------------------------------------------------------------


class SharedTensor(NamedTuple):
    """A tensor that another process of this host maps instead of receiving a copy.

    - data: uint8 array with a CPU tensor's bytes; or the function and arguments that open a CUDA tensor's memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Any

    @classmethod
    def of(cls, tensor: Tensor) -> SharedTensor:
        """Share a dense tensor. A CUDA tensor's memory is kept until the receiver has dropped it."""
        tensor = tensor.detach()
        data = reduce_tensor(tensor) if tensor.is_cuda else tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return cls(tensor.dtype, tuple(tensor.shape), data)

    def open(self) -> Tensor:
        """Return the tensor, which aliases the sender's memory."""
        if isinstance(self.data, np.ndarray):
            return torch.from_numpy(self.data).view(self.dtype).reshape(self.shape)
        rebuild, args = self.data
        return rebuild(*args)

    def release(self) -> None:
        """Release a CUDA tensor's memory in place of a receiver that is lost."""
        if not isinstance(self.data, np.ndarray):
            _, args = self.data
            counter_handle, counter_offset = args[11:13]  # as in rebuild_cuda_tensor
            torch.UntypedStorage._release_ipc_counter_cuda(counter_handle, counter_offset)


# ---- sending and receiving -----------------------------------------------------------------------------------------


class PackedMessage:
    """A message that is ready to be sent to several receivers."""

    def __init__(self, message: Any):
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, 5, buffer_callback=buffers.append)
        parts = [buffer.raw() for buffer in buffers]
        sizes = [part.nbytes for part in parts]
        self._file: io.FileIO | None = None
        is_shared = sum(sizes) >= SHARED_BYTES
        head = struct.pack(f"<?I{len(sizes)}Q", is_shared, len(sizes), *sizes)
        if is_shared:
            self._payload = head + body
            self._file = _write_shared(parts)
        else:
            self._payload = b"".join((head, *parts, body))

    def send(self, pipe: Connection) -> None:
        """Send the message. Raises OSError if the receiver has closed its end."""
        pipe.send_bytes(self._payload)
        if self._file is not None:
            with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                socket.send_fds(sock, [b"\0"], [self._file.fileno()])

    def close(self) -> None:
        """Release the shared memory; receivers that have the message keep theirs."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> PackedMessage:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def receive(pipe: Connection) -> Any:
    """Receive a message. Large arrays in it alias shared memory. Raises EOFError if the sender is gone."""
    payload = memoryview(pipe.recv_bytes())
    is_shared, count = struct.unpack_from("<?I", payload)
    sizes = struct.unpack_from(f"<{count}Q", payload, 5)
    rest = payload[5 + 8 * count :]
    if is_shared:
        return pickle.loads(rest, buffers=_map_shared(pipe, sizes))
    parts = []
    for size in sizes:
        parts.append(bytearray(rest[:size]))  # writable, as the sender's arrays are
        rest = rest[size:]
    return pickle.loads(rest, buffers=parts)


def _write_shared(parts: Sequence[memoryview]) -> io.FileIO:
    """Copy the parts, each at a multiple of ALIGNMENT, to new shared memory and return its file."""
    file = anonymous_file("encore-message")
    try:
        padded: list[Any] = []
        for part in parts:
            padded += [part, bytes(-part.nbytes % ALIGNMENT)]
        padded = [memoryview(part).cast("B") for part in padded if len(part)]
        while padded:
            written = os.writev(file.fileno(), padded[:MAX_PARTS])
            while padded and written >= len(padded[0]):
                written -= len(padded.pop(0))
            if written:
                padded[0] = padded[0][written:]
        return file
    except BaseException:
        file.close()
        raise


def _map_shared(pipe: Connection, sizes: Sequence[int]) -> list[memoryview]:
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if not fds:
        raise EOFError("the sender is gone")
    try:
        memory = memoryview(mmap.mmap(fds[0], 0, access=mmap.ACCESS_COPY))  # writable, as the sender's arrays are
    finally:
        os.close(fds[0])
    parts, start = [], 0
    for size in sizes:
        parts.append(memory[start : start + size])
        start += size + -size % ALIGNMENT
    return parts
