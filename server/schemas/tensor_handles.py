"""Handles of GPU memory in requests, in vLLM's and SGLang's formats, read without unpickling.

Both send pickles of what `torch.multiprocessing.reductions.reduce_tensor` returns. Exactly that is read. Everything
else in a pickle is refused by its name, before any memory is opened.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from math import prod
from typing import Any

from engine.errors import RequestError
from engine.protocol.memory_handles import ANY_GPU, MemoryHandle, SharedWeight, SharedWeights
from server.schemas import inert_pickle
from server.schemas.inert_pickle import Call, Name

REDUCTIONS = "torch.multiprocessing.reductions"
REBUILD = Name(REDUCTIONS, "rebuild_cuda_tensor")
REBUILD_BY_UUID = "_rebuild_cuda_tensor_modified"  # SGLang's, with a GPU's UUID as the device; trainers have copies
METADATA = "FlattenedTensorMetadata"  # of a tensor in SGLang's buffers; trainers have copies
SIZE = Name("torch", "Size")
FROM_DISK = "save safetensors where the server can read them, such as in /dev/shm, and call /update_weights_from_disk"
# Of the arguments of rebuild_cuda_tensor; those left out are classes, and whether a gradient is wanted.
NUM_ARGUMENTS = 15
TENSORS = (Name("torch", "Tensor"), Name("torch.nn.parameter", "Parameter"))
STORAGES = (Name("torch.storage", "TypedStorage"), Name("torch.storage", "UntypedStorage"))
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}  # of dtypes of more than a byte


class _Unreadable(ValueError):
    """The pickle has something else than a handle; the message says what."""


def from_vllm(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    pickled: str,
    sizes: Sequence[int] | None,
) -> SharedWeights:
    """Read `ipc_handles_pickled`: a dictionary from GPU to handle for each tensor, or one for a buffer of all.

    A buffer has the tensors one after the other; `sizes` are their bytes. Raises RequestError.
    """
    counts = {len(names), len(dtypes), len(shapes)} | (set() if sizes is None else {len(sizes)})
    if len(counts) > 1:
        raise RequestError(
            f"found {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} shapes: give one of each for a "
            "tensor, and of tensor_sizes in a buffer",
            param="names",
        )
    try:
        found = _read(pickled)
        if isinstance(found, dict) == (sizes is None):
            raise _Unreadable("a list is due without tensor_sizes, and a dictionary with them")
        entries = [found] if isinstance(found, dict) else _expect(found, list, "the pickle")
        if sizes is None and len(entries) != len(names):
            raise _Unreadable(f"{len(entries)} handles were sent for {len(names)} names")
        handles = [_by_gpu(_expect(entry, dict, "an entry")) for entry in entries]
    except _Unreadable as error:
        raise _refusal(error, "ipc_handles_pickled") from error
    first, weights = 0, []
    for index, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        short = dtype.removeprefix("torch.")
        if sizes is None:
            weights.append(SharedWeight(name, short, tuple(shape), index))
            continue
        size = _num_bytes(short, shape)
        if sizes[index] != size:
            raise RequestError(
                f"tensor_sizes[{index}]={sizes[index]} is invalid: {dtype} {list(shape)} has {size} bytes",
                param="tensor_sizes",
            )
        weights.append(SharedWeight(name, short, tuple(shape), 0, first))
        first += size
    return SharedWeights(handles, weights)


def from_skyrl(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], pickled: str, counts: Sequence[int]
) -> SharedWeights:
    """Read the handle of a buffer of tensors of one dtype; `counts` are their elements. Raises RequestError."""
    if len(set(dtypes)) > 1:
        raise RequestError("the tensors of one buffer must have one dtype", param="dtype_names")
    step = ITEM_BYTES.get(dtypes[0].removeprefix("torch."), 1) if dtypes else 1
    return from_vllm(names, dtypes, shapes, pickled, [step * count for count in counts])


def from_sglang(serialized: str, is_bucket: bool) -> SharedWeights:
    """Read an entry of `serialized_named_tensors`: (name, tensor) pairs, or a buffer with a description of its tensors.

    Raises RequestError.
    """
    try:
        found = _read(serialized)
        if is_bucket:
            return _bucket(_expect(found, dict, "the pickle"))
        handles, weights = [], []
        for index, pair in enumerate(_expect(found, list, "the pickle")):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise _Unreadable("an entry is no pair of a name and a tensor")
            gpu, handle = _rebuilt(pair[1])
            handles.append({gpu: handle})
            weights.append(SharedWeight(_expect(pair[0], str, "a name"), handle.dtype, handle.shape, index))
    except _Unreadable as error:
        raise _refusal(error, "serialized_named_tensors") from error
    return SharedWeights(handles, weights)


def _bucket(found: dict[str, Any]) -> SharedWeights:
    if found.keys() != {"flattened_tensor", "metadata"}:
        raise _Unreadable("a buffer has flattened_tensor and metadata, and nothing else")
    gpu, handle = _rebuilt(found["flattened_tensor"])
    weights = []
    for entry in _expect(found["metadata"], list, "metadata"):
        if (
            not isinstance(entry, Call)
            or entry.function.name != METADATA
            or entry.args
            or type(entry.state) is not dict
        ):
            raise _Unreadable(f"metadata has {_described(entry)} where {METADATA} is due")
        fields = entry.state
        dtype, start = _dtype(fields.get("dtype")), _expect(fields.get("start_idx"), int, "start_idx")
        if handle.dtype not in ("uint8", dtype):
            raise _Unreadable(f"a tensor of {dtype} is in a buffer of {handle.dtype}")
        name, shape = _expect(fields.get("name"), str, "a name"), _shape(fields.get("shape"))
        step, end = ITEM_BYTES.get(handle.dtype, 1), _expect(fields.get("end_idx"), int, "end_idx")
        if (end - start) * step != _num_bytes(dtype, shape):
            raise _Unreadable(f"start_idx and end_idx of {name[:200]} don't fit its shape")
        weights.append(SharedWeight(name, dtype, shape, 0, start * step))
    return SharedWeights([{gpu: handle}], weights)


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * ITEM_BYTES.get(dtype, 1)


def _by_gpu(entry: dict[str, Any]) -> dict[str, MemoryHandle]:
    """Return the handles of a tensor by their GPU: each is (function, arguments), or the arguments alone."""
    handles = {}
    for gpu, value in entry.items():
        if type(value) is not tuple:
            raise _Unreadable(f"a GPU has {_described(value)} where a tuple is due")
        if len(value) == 2 and isinstance(value[0], Name):
            value = Call(value[0], _expect(value[1], tuple, "arguments"))
        else:
            value = Call(REBUILD, value)
        handles[gpu] = _rebuilt(value)[1]
    return handles


def _rebuilt(value: Any) -> tuple[str, MemoryHandle]:
    """Return the GPU, if it is said, and the handle in a call of rebuild_cuda_tensor."""
    if not isinstance(value, Call):
        raise _Unreadable(f"it has {_described(value)} where a tensor is due")
    function = value.function
    if function != REBUILD and function.name != REBUILD_BY_UUID:
        raise _Unreadable(f"it calls {function.module}.{function.name}")
    if len(value.args) != NUM_ARGUMENTS or value.state is not None:
        raise _Unreadable(f"{function.name} has {len(value.args)} arguments instead of {NUM_ARGUMENTS}")
    (kind, shape, stride, offset, storage, dtype, device, memory, num_bytes, start, gradient, counter, index, event,
     has_event) = value.args  # fmt: skip
    if kind not in TENSORS or storage not in STORAGES or type(gradient) is not bool:
        raise _Unreadable("the classes of a tensor are others than PyTorch's")
    if type(device) not in (int, str):
        raise _Unreadable(f"a device is {_described(device)}")
    if memory is None:
        raise _Unreadable("a tensor has no memory")
    handle = MemoryHandle(
        shape=_shape(shape), stride=_shape(stride), offset=_expect(offset, int, "an offset"), dtype=_dtype(dtype),
        memory=_expect(memory, bytes, "a handle"), num_bytes=_expect(num_bytes, int, "a size"),
        start=_expect(start, int, "an offset"), counter=_expect(counter, bytes, "a counter"),
        counter_index=_expect(index, int, "an index"), event=_expect(event, bytes, "an event"),
        has_event=_expect(has_event, bool, "a flag"),
    )  # fmt: skip
    return (device if isinstance(device, str) else ANY_GPU), handle


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, Call) and value.function == SIZE and len(value.args) == 1 and value.state is None:
        value = value.args[0]
    return tuple(_expect(size, int, "a size") for size in _expect(value, tuple, "a shape"))


def _dtype(value: Any) -> str:
    if type(value) is not Name or value.module != "torch":
        raise _Unreadable(f"a dtype is {_described(value)}")
    return value.name


def _read(text: str) -> Any:
    try:
        return inert_pickle.read(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise _Unreadable("it is no base64") from error
    except ValueError as error:
        raise _Unreadable(str(error).splitlines()[0][:200] if str(error) else "it is no pickle") from error


def _expect(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise _Unreadable(f"{what} is {_described(value)}")
    return value


def _described(value: Any) -> str:
    """Return a short description that doesn't depend on the size of the value."""
    if isinstance(value, Call):
        return f"a call of {value.function.module}.{value.function.name}"
    return f"{value.module}.{value.name}" if isinstance(value, Name) else f"of type {type(value).__name__}"


def _refusal(error: _Unreadable, param: str) -> RequestError:
    return RequestError(
        f"{param}: only handles of tensors in a GPU's memory are read, and nothing is unpickled: {error}; for other "
        f"tensors, {FROM_DISK}",
        param=param,
    )
