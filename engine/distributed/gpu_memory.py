"""Open a trainer's tensors in the memory of the GPU that this process uses, too (CUDA IPC).

torch opens whatever a handle says: a wrong size, offset or counter would read or write foreign memory. So all of them
are checked here, before and after opening.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from engine.distributed.weight_group import DTYPES
from engine.errors import RequestError, WeightUpdateError
from engine.protocol.memory_handles import ANY_GPU, MemoryHandle, SharedWeight, SharedWeights

# Of PyTorch: a handle begins with its version and the kind of allocation, and counters are in files of this many int64.
HANDLE_BYTES, PLAIN_ALLOCATION, VERSION = 64, b"c", b"\x01"
COUNTER_NAME, NUM_COUNTERS = re.compile(rb"/?torch_[0-9A-Za-z_]{1,64}"), 10_000
COUNTER_HEADER_BYTES = 64  # before the counters in their file
EXPANDABLE = (
    "the memory is in expandable segments, which are not read: remove expandable_segments:True from the trainer's "
    "PYTORCH_CUDA_ALLOC_CONF"
)


def open_weights(shared: SharedWeights, device: torch.device) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) pairs that alias the sender's memory, complete for every stream of `device`.

    The sender's counters are released when the tensors are freed. Raises RequestError for handles that are not valid,
    and WeightUpdateError for memory that can't be opened.
    """
    if device.type != "cuda":
        raise RequestError(f"the weights are in the memory of a GPU, and this engine runs on {device.type}")
    torch.cuda.set_device(device)  # of this thread
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    chosen = [_handle_of(handle, uuid) for handle in shared.handles]
    for handle in chosen:
        _check(handle)
    for weight in shared.weights:
        _check_part(weight, chosen[weight.source])
    opened = [_open(handle, device) for handle in chosen]
    torch.cuda.current_stream(device).synchronize()  # it waited for the sender's events
    return [(weight.name, _part(weight, opened[weight.source])) for weight in shared.weights]


def _handle_of(handles: Mapping[str, MemoryHandle], uuid: str) -> MemoryHandle:
    found = handles.get(uuid, handles.get(ANY_GPU))
    if found is None:
        raise RequestError(
            f"the weights are in the memory of {', '.join(sorted(handles)) or 'no GPU'}, and this engine uses {uuid}: "
            "send handles of that GPU"
        )
    return found


def _check(handle: MemoryHandle) -> None:
    """Raise RequestError unless the handle is one of a plain allocation, and its numbers fit each other."""
    dtype = _dtype(handle.dtype)
    # the two bytes before the driver's handle are missing in the format of PyTorch 2.5 and earlier
    kind = PLAIN_ALLOCATION if len(handle.memory) == HANDLE_BYTES else handle.memory[1:2]
    if kind == b"e":
        raise RequestError(EXPANDABLE)
    if kind != PLAIN_ALLOCATION or len(handle.memory) not in (HANDLE_BYTES, HANDLE_BYTES + 2):
        raise RequestError(f"the handle of the memory has {len(handle.memory)} bytes of an unknown kind")
    if len(handle.event) != HANDLE_BYTES and handle.has_event:
        raise RequestError(f"the handle of the event has {len(handle.event)} bytes instead of {HANDLE_BYTES}")
    if not COUNTER_NAME.fullmatch(handle.counter) or not 0 <= handle.counter_index < NUM_COUNTERS:
        raise RequestError("the name or the index of the reference counter is invalid")
    file = b"/dev/shm/" + handle.counter.removeprefix(b"/")
    if os.path.exists(file) and not 0 <= os.stat(file).st_size - 8 * NUM_COUNTERS <= COUNTER_HEADER_BYTES:
        raise RequestError("the shared memory of the reference counter has another size than PyTorch's")
    numbers = (*handle.shape, *handle.stride, handle.offset, handle.num_bytes, handle.start)
    if any(not 0 <= number < 1 << 62 for number in numbers) or len(handle.shape) != len(handle.stride):
        raise RequestError("the shape, stride, offset or size of the memory is invalid")
    last = handle.offset + sum((size - 1) * step for size, step in zip(handle.shape, handle.stride, strict=True))
    if prod(handle.shape) and (last + 1) * dtype.itemsize > handle.num_bytes:
        raise RequestError(
            f"a tensor of shape {list(handle.shape)} ends beyond its {handle.num_bytes} bytes of memory", param="shapes"
        )


def _check_part(weight: SharedWeight, handle: MemoryHandle) -> None:
    if weight.first_byte is None:
        if weight.dtype != handle.dtype or weight.shape != handle.shape:
            raise RequestError(
                f"{weight.name}: announced as {weight.dtype} {list(weight.shape)}, but the memory has {handle.dtype} "
                f"{list(handle.shape)}",
                param="shapes",
            )
        return
    dtype, size = _dtype(weight.dtype), prod(handle.shape) * _dtype(handle.dtype).itemsize
    if min(weight.shape, default=0) < 0 or weight.first_byte < 0 or weight.first_byte % dtype.itemsize:
        raise RequestError(f"{weight.name}: the shape or the first byte {weight.first_byte} is invalid", param="shapes")
    if weight.first_byte + prod(weight.shape) * dtype.itemsize > size:
        raise RequestError(f"{weight.name} ends beyond the {size} bytes of its buffer", param="shapes")
    if handle.stride != (1,) or handle.offset * _dtype(handle.dtype).itemsize % dtype.itemsize:
        raise RequestError(f"{weight.name}: the buffer of several tensors must be one-dimensional and aligned")


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise RequestError(f"dtype {name[:80]!r} is not supported: use one of {', '.join(DTYPES)}", param="dtype_names")
    return DTYPES[name]


def _open(handle: MemoryHandle, device: torch.device) -> Tensor:
    """Open the memory, and check that it is as large as the handle says."""
    dtype = DTYPES[handle.dtype]
    if not prod(handle.shape):
        return torch.empty(handle.shape, dtype=dtype, device=device)
    # the trainer's PyTorch may write a later version, in which handles of this kind are the same
    memory = VERSION + PLAIN_ALLOCATION + handle.memory[-HANDLE_BYTES:]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(  # noqa: SLF001
            torch.cuda.current_device(), memory, handle.num_bytes, handle.start, handle.counter, handle.counter_index,
            handle.event, handle.has_event,
        )  # fmt: skip
    except RuntimeError as error:
        raise WeightUpdateError(
            f"the trainer's memory can't be opened; it must be another process of this machine that holds its tensors "
            f"until the answer: {str(error).splitlines()[0]}"
        ) from error
    if not _in_one_allocation(storage.data_ptr(), handle.num_bytes):
        raise RequestError(f"the trainer's memory is smaller than {handle.num_bytes} bytes from {handle.start}")
    return torch.empty(0, dtype=dtype, device=device).set_(storage, handle.offset, handle.shape, handle.stride)


def _in_one_allocation(address: int, size: int) -> bool:
    """Return whether this range of addresses lies in one allocation of the driver."""
    base, length = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(length), ctypes.c_uint64(address))
    return not failed and base.value <= address and address + size <= base.value + length.value


def _part(weight: SharedWeight, opened: Tensor) -> Tensor:
    if weight.first_byte is None:
        return opened
    dtype = DTYPES[weight.dtype]
    size = prod(weight.shape) * dtype.itemsize
    return opened.view(torch.uint8)[weight.first_byte : weight.first_byte + size].view(dtype).view(weight.shape)
