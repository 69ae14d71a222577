"""Handles of a trainer's GPU memory, as CUDA IPC gives them to another process of the machine.

Plain values, which a server reads from a request and the engine opens; see `distributed/gpu_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ANY_GPU = ""  # the key of a handle that doesn't say on which GPU its memory is


class MemoryHandle(NamedTuple):
    """One tensor in another process's memory: what `torch.multiprocessing.reductions.rebuild_cuda_tensor` takes.

    - dtype: its name in torch, such as "bfloat16".
    - shape, stride, offset: of the tensor in its storage, in elements.
    - memory: the handle of an allocation; the storage is the `num_bytes` bytes of it from `start`.
    - counter, counter_index: name and entry of the shared memory in which the sender counts who uses the storage.
    - event, has_event: handle of the event after which the data is complete, if there is one.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    memory: bytes
    num_bytes: int
    start: int
    counter: bytes
    counter_index: int
    event: bytes
    has_event: bool


class SharedWeight(NamedTuple):
    """A weight in shared memory: the whole tensor of handle `source`, or its bytes from `first_byte` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: int
    first_byte: int | None = None


@dataclass(frozen=True)
class SharedWeights:
    """Weights, and the handles that they are in. Each handle is a dictionary from a GPU's UUID, or ANY_GPU."""

    handles: list[dict[str, MemoryHandle]]
    weights: list[SharedWeight]
