"""Handles of GPU memory in vLLM's and SGLang's formats, as PyTorch pickles them, and hostile pickles."""

from __future__ import annotations

import base64
import os
import pickle
import random
from dataclasses import dataclass

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from engine.errors import RequestError
from engine.protocol.memory_handles import ANY_GPU
from server.schemas import inert_pickle
from server.schemas.tensor_handles import from_sglang, from_vllm

GPU = "8f2c1d00-0000-4000-8000-000000000001"
MEMORY, EVENT = b"\x02c" + bytes(range(64)), bytes(64)


def arguments(shape=(2, 3), dtype=torch.bfloat16, device=0, **changes):
    """Return what `reduce_tensor` returns for a tensor on a GPU."""
    values = {
        "tensor_cls": torch.Tensor, "shape": torch.Size(shape), "stride": torch.empty(shape).stride(), "offset": 0,
        "storage_cls": torch.storage.TypedStorage, "dtype": dtype, "device": device, "memory": MEMORY,
        "num_bytes": 2 * torch.Size(shape).numel(), "start": 512, "gradient": False,
        "counter": b"/torch_17_2_0", "index": 3, "event": EVENT, "has_event": False,
    }  # fmt: skip
    return tuple((values | changes).values())


class OnGpu:
    """A stand-in for a tensor on a GPU: it is pickled as one."""

    def __init__(self, function=rebuild_cuda_tensor, **changes):
        self.reduced = (function, arguments(**changes))

    def __reduce__(self):
        return self.reduced


@dataclass
class FlattenedTensorMetadata:
    """As SGLang's."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def _rebuild_cuda_tensor_modified(*args):
    raise AssertionError("nothing is called")


def encoded(value, protocol=None):
    return base64.b64encode(pickle.dumps(value, protocol)).decode()


def vllm(value, names=("a", "b"), dtypes=("bfloat16", "bfloat16"), shapes=((2, 3), (2, 3)), sizes=None, protocol=None):
    return from_vllm(names, dtypes, shapes, encoded(value, protocol), sizes)


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("has_function", [True, False])
def test_vllms_handles_are_those_of_the_tensors(protocol, has_function):
    args = arguments()
    entry = (rebuild_cuda_tensor, args) if has_function else args
    found = vllm([{GPU: entry}, {GPU: entry, "other": entry}], protocol=protocol)
    assert [(one.name, one.dtype, one.shape, one.source) for one in found.weights] == [
        ("a", "bfloat16", (2, 3), 0),
        ("b", "bfloat16", (2, 3), 1),
    ]
    assert [list(one) for one in found.handles] == [[GPU], [GPU, "other"]]
    handle = found.handles[0][GPU]
    assert handle.memory == MEMORY and handle.event == EVENT and handle.counter == b"/torch_17_2_0"
    assert (handle.shape, handle.stride, handle.offset, handle.dtype) == ((2, 3), (3, 1), 0, "bfloat16")
    assert (handle.num_bytes, handle.start, handle.counter_index, handle.has_event) == (12, 512, 3, False)


def test_vllms_buffer_has_the_tensors_one_after_the_other():
    entry = (rebuild_cuda_tensor, arguments((28,), torch.uint8))
    found = vllm({GPU: entry}, dtypes=("bfloat16", "torch.float32"), shapes=((2, 3), (4,)), sizes=(12, 16))
    assert [tuple(one) for one in found.weights] == [("a", "bfloat16", (2, 3), 0, 0), ("b", "float32", (4,), 0, 12)]


def test_sizes_that_do_not_fit_the_shapes_are_refused():
    entry = (rebuild_cuda_tensor, arguments((28,), torch.uint8))
    with pytest.raises(
        RequestError, match=r"tensor_sizes\[0\]=16 is invalid: bfloat16 \[2, 3\] has 12 bytes"
    ) as caught:
        vllm({GPU: entry}, sizes=(16, 12))
    assert caught.value.param == "tensor_sizes"
    entry = FlattenedTensorMetadata("a", torch.Size((2, 3)), torch.bfloat16, 0, 5, 5)
    with pytest.raises(RequestError, match="start_idx and end_idx of a don't fit its shape"):
        from_sglang(encoded({"flattened_tensor": OnGpu(), "metadata": [entry]}), is_bucket=True)


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_sglangs_tensors_and_buffers_are_read(protocol):
    pairs = [("a", OnGpu()), ("b", OnGpu(_rebuild_cuda_tensor_modified, shape=(4,), device=GPU))]
    found = from_sglang(encoded(pairs, protocol), is_bucket=False)
    assert [tuple(one) for one in found.weights] == [
        ("a", "bfloat16", (2, 3), 0, None),
        ("b", "bfloat16", (4,), 1, None),
    ]
    assert [list(one) for one in found.handles] == [[ANY_GPU], [GPU]]
    for dtype, step in ((torch.bfloat16, 1), (torch.uint8, 2)):  # older buffers have elements, newer ones bytes
        metadata = [
            FlattenedTensorMetadata("a", torch.Size((2, 3)), torch.bfloat16, 0, 6 * step, 6 * step),
            FlattenedTensorMetadata("b", torch.Size((4,)), torch.bfloat16, 6 * step, 10 * step, 4 * step),
        ]
        buffer = {"flattened_tensor": OnGpu(shape=(10 * step,), dtype=dtype, device=GPU), "metadata": metadata}
        found = from_sglang(encoded(buffer, protocol), is_bucket=True)
        assert [tuple(one) for one in found.weights] == [
            ("a", "bfloat16", (2, 3), 0, 0),
            ("b", "bfloat16", (4,), 0, 12),
        ]
        assert list(found.handles[0]) == [GPU]


class Evil:
    """Its pickle runs a command."""

    def __reduce__(self):
        return os.system, ("touch /tmp/encore-was-here",)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Evil(), "posix.system"),
        ([Evil()] * 2, "posix.system"),
        ([{GPU: (os.system, ("true",))}, {GPU: arguments()}], "posix.system"),
        ([{GPU: arguments(tensor_cls=os.system)}] * 2, "classes"),
        ([{GPU: arguments(storage_cls=Evil())}] * 2, "classes"),
        ([{GPU: arguments(memory="text")}] * 2, "a handle is of type str"),
        ([{GPU: arguments(start=1.5)}] * 2, "BINFLOAT"),
        ([{GPU: arguments(offset=True)}] * 2, "an offset is of type bool"),
        ([{GPU: arguments(dtype="bfloat16")}] * 2, "a dtype is of type str"),
        ([{GPU: arguments()[:7]}] * 2, "7 arguments instead of 15"),
        ([{GPU: arguments()}], "1 handles were sent for 2 names"),
        ({GPU: arguments()}, "tensor_sizes"),
        ([{1: arguments()}] * 2, "int where str is due"),
        ([{GPU: [1]}] * 2, "tuple"),
        ([torch.ones(2)] * 2, "a call of torch._utils._rebuild_tensor_v2"),
        ({1, 2}, "opcode"),
        (None, "NoneType"),
    ],
)  # fmt: skip
def test_anything_else_in_a_pickle_is_refused_by_its_name(value, said, tmp_path):
    with pytest.raises(RequestError, match="nothing is unpickled") as caught:
        vllm(value)
    assert caught.value.param == "ipc_handles_pickled" and "/update_weights_from_disk" in str(caught.value)
    assert said in str(caught.value) and len(str(caught.value)) < 600
    assert not os.path.exists("/tmp/encore-was-here")


def test_sglangs_formats_are_refused_by_what_is_wrong():
    cpu = [("a", torch.ones(2))]
    entry = FlattenedTensorMetadata("a", torch.Size((2,)), torch.float16, 0, 2, 2)
    for value, is_bucket, said in (
        (cpu, False, "it calls torch._utils._rebuild_tensor_v2"),
        ([("a", OnGpu(device=GPU)), "b"], False, "no pair"),
        ({"flattened_tensor": OnGpu()}, True, "flattened_tensor and metadata"),
        ({"flattened_tensor": OnGpu(), "metadata": [Evil()]}, True, "posix.system"),
        ({"flattened_tensor": OnGpu(), "metadata": [entry]}, True, "float16 is in a buffer of bfloat16"),
        ([("a", OnGpu())], True, "of type list"),
    ):
        with pytest.raises(RequestError, match="nothing is unpickled") as caught:
            from_sglang(encoded(value), is_bucket)
        assert said in str(caught.value)
    for text in ("", "no base64!", encoded(cpu)[:-8], "gASVAAAA"):
        with pytest.raises(RequestError, match="nothing is unpickled"):
            from_sglang(text, False)


def test_a_small_pickle_of_a_huge_value_costs_no_time():
    nested = ()
    for _ in range(200):
        nested = (nested, nested)  # 2**200 values, of which the pickle has each once
    with pytest.raises(RequestError, match="nothing is unpickled"):
        vllm([nested, nested])
    as_key = pickle.dumps({"": ""}).replace(pickle.dumps("")[11:-1], b"")  # would be hashed for ever
    with pytest.raises(ValueError):
        inert_pickle.read(as_key)


def test_damaged_pickles_raise_nothing_but_the_refusal():
    generator = random.Random(0)
    good = pickle.dumps([("a", OnGpu()), ("b", OnGpu(device=GPU))])
    for _ in range(600):
        data = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            from_sglang(base64.b64encode(data).decode(), False)
        except RequestError:
            pass
