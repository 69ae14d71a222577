"""Weights in the GPU memory of a trainer in another process: opened, written, released, and refused."""

from __future__ import annotations

import base64
import gc
import multiprocessing
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import pytest
import safetensors.torch
import torch
from torch.multiprocessing.reductions import reduce_tensor

from engine.core.operations import Operations
from engine.distributed.gpu_memory import open_weights
from engine.errors import RequestError, WeightUpdateError
from engine.protocol.memory_handles import ANY_GPU, MemoryHandle, SharedWeight, SharedWeights
from server.schemas.tensor_handles import from_sglang, from_vllm
from tests.engine.lively import PROMPTS, Reference
from tests.support.engines import greedy_tokens

COUNT = 8


@dataclass
class FlattenedTensorMetadata:
    """As SGLang's."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def encoded(value) -> str:
    return base64.b64encode(bytes(ForkingPickler.dumps(value))).decode()


def trainer(pipe, folder) -> None:
    """Hold weights on the GPU and answer commands, in a separate process."""
    gpu = str(torch.cuda.get_device_properties(0).uuid)
    tensors, flat, empty = {}, None, 0
    while (command := pipe.recv()) != "stop":
        answer = None
        if command == "load":
            empty = torch.cuda.memory_allocated()
            tensors = {name: one.cuda() for name, one in safetensors.torch.load_file(folder).items()}
            flat = torch.cat([one.reshape(-1).view(torch.uint8) for one in tensors.values()])
        elif command == "vllm":
            answer = encoded([{gpu: reduce_tensor(one)} for one in tensors.values()])
        elif command == "vllm buffer":
            answer = encoded({gpu: reduce_tensor(flat)})
        elif command == "sglang":
            answer = encoded(list(tensors.items()))
        elif command == "sglang bucket":
            metadata, start = [], 0
            for name, one in tensors.items():
                end = start + one.nbytes
                metadata.append(FlattenedTensorMetadata(name, one.shape, one.dtype, start, end, one.nbytes))
                start = end
            answer = encoded({"flattened_tensor": flat, "metadata": metadata})
        elif command == "zero":
            for one in (*tensors.values(), flat):
                one.zero_()
            torch.cuda.synchronize()
        elif command == "drop":  # returns what stays allocated
            one, tensors, flat = None, {}, None
            gc.collect()
            torch.cuda.ipc_collect()
            answer = torch.cuda.memory_allocated() - empty
        pipe.send(answer)


@pytest.fixture(scope="module")
def process(other_model):
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=trainer, args=(theirs, other_model / "model.safetensors"))
    process.start()
    yield pipe
    pipe.send("stop")
    process.join(30)
    process.kill()


@pytest.fixture
def ask(process):
    """Send a command to a trainer that holds the weights of `other_model`, and return its answer."""

    def ask(command):
        process.send(command)
        assert process.poll(60)
        return process.recv()

    ask("load")
    yield ask
    ask("drop")


FORMATS = ("vllm", "vllm buffer", "sglang", "sglang bucket")


def shared_by(ask, how, weights) -> SharedWeights:
    sent = ask(how)
    if how.startswith("sglang"):
        return from_sglang(sent, is_bucket="bucket" in how)
    names = list(weights)
    dtypes = [str(one.dtype) for one in weights.values()]
    sizes = [one.nbytes for one in weights.values()] if "buffer" in how else None
    return from_vllm(names, dtypes, [list(one.shape) for one in weights.values()], sent, sizes)


@pytest.fixture
def weights(other_model):
    return safetensors.torch.load_file(other_model / "model.safetensors")


@pytest.fixture(scope="module")
def references(lively_model, other_model):
    return {"a": Reference(lively_model), "b": Reference(other_model)}


@pytest.mark.gpu
@pytest.mark.parametrize("how", FORMATS)
def test_opened_tensors_are_the_trainers_until_they_are_freed(ask, weights, how):
    opened = dict(open_weights(shared_by(ask, how, weights), torch.device("cuda:0")))
    assert opened.keys() == weights.keys()
    for name, tensor in opened.items():
        assert torch.equal(tensor.cpu(), weights[name]), name
    ask("zero")
    assert not any(tensor.any() for tensor in opened.values()), "no copies"
    del tensor
    opened.clear()
    torch.cuda.ipc_collect()
    assert ask("drop") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_running_engine_takes_them_and_captures_nothing(ask, make_engine, weights, references, how, in_parts):
    engine = make_engine(device="cuda:0", num_pages=64)
    assert greedy_tokens(engine, list(PROMPTS), COUNT) == [references["a"].greedy(one, COUNT) for one in PROMPTS]
    captures = engine.loop.executor.graphs.stats.captures
    before, operations = captures.total(), Operations(engine.loop)
    if in_parts:
        operations.call("start_weight_update", ())
    shared = shared_by(ask, how, weights)
    future, finish = operations.call("update_weights_from_memory", (shared, None if in_parts else "b"))
    written, version = finish(future.result(60))
    ask("zero")  # the trainer may change its tensors from now on
    if in_parts:
        assert (written, version) == (0, "initial")
        written, version = operations.call("finish_weight_update", ("b",))
    assert (written, version) == (len(weights), "b")
    assert greedy_tokens(engine, list(PROMPTS), COUNT) == [references["b"].greedy(one, COUNT) for one in PROMPTS]
    assert captures.total() == before
    assert ask("drop") == 0


HANDLE = MemoryHandle((4,), (1,), 0, "float32", b"\x02c" + bytes(64), 16, 0, b"/torch_1_2_3", 0, bytes(64), False)
GOOD = SharedWeight("a", "float32", (4,), 0)


def refused(shared, device="cuda:0", error=RequestError):
    with pytest.raises(error) as caught:
        open_weights(shared, torch.device(device))
    return str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_bytes": 15}, "ends beyond its 15 bytes"),
        ({"offset": 1}, "ends beyond its 16 bytes"),
        ({"stride": (1 << 61,)}, "ends beyond"),
        ({"offset": -4}, "invalid"),
        ({"start": 1 << 63}, "invalid"),
        ({"stride": ()}, "invalid"),
        ({"dtype": "system"}, "dtype 'system' is not supported"),
        ({"memory": b"\x02e" + bytes(64)}, "expandable_segments"),
        ({"memory": b"\x02c" + bytes(63)}, "65 bytes of an unknown kind"),
        ({"memory": b"\x02x" + bytes(64)}, "unknown kind"),
        ({"event": b"", "has_event": True}, "handle of the event"),
        ({"counter": b"/etc/passwd"}, "reference counter is invalid"),
        ({"counter": b"torch_1/../../x"}, "reference counter is invalid"),
        ({"counter_index": 10_000}, "reference counter is invalid"),
        ({"counter_index": -1}, "reference counter is invalid"),
    ],
)  # fmt: skip
def test_a_handle_whose_numbers_lie_is_refused_before_it_is_opened(changes, said):
    assert said in refused(SharedWeights([{ANY_GPU: HANDLE._replace(**changes)}], [GOOD]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (("a", "bfloat16", (4,), 0), "a: announced as bfloat16 [4], but the memory has float32 [4]"),
        (("a", "float32", (2, 2), 0), "announced as float32 [2, 2]"),
        (("a", "float32", (2,), 0, 12), "a ends beyond the 16 bytes of its buffer"),
        (("a", "float32", (2,), 0, 2), "invalid"),
        (("a", "float32", (2,), 0, -4), "invalid"),
        (("a", "float32", (-2,), 0, 0), "invalid"),
    ],
)  # fmt: skip
def test_a_weight_that_does_not_fit_its_memory_is_refused(weight, said):
    assert said in refused(SharedWeights([{ANY_GPU: HANDLE}], [SharedWeight(*weight)]))


@pytest.mark.gpu
def test_memory_of_another_gpu_or_that_is_not_there_is_refused_and_the_gpu_goes_on(ask, weights):
    assert "in the memory of other-gpu, and this engine uses" in refused(SharedWeights([{"other-gpu": HANDLE}], [GOOD]))
    gone = refused(SharedWeights([{ANY_GPU: HANDLE}], [GOOD]), error=WeightUpdateError)
    assert "the trainer's memory can't be opened" in gone
    shared = shared_by(ask, "vllm buffer", weights)
    [[(gpu, handle)]] = [list(one.items()) for one in shared.handles]
    # a larger tensor than the trainer's allocation
    size = 1 << 40
    longer = handle._replace(shape=(size,), num_bytes=size)
    assert "memory is smaller than" in refused(SharedWeights([{gpu: longer}], [SharedWeight("a", "uint8", (size,), 0)]))
    assert torch.ones(4, device="cuda").sum().item() == 4
    opened = dict(open_weights(shared, torch.device("cuda:0")))
    assert torch.equal(opened["model.norm.weight"].cpu(), weights["model.norm.weight"])


def test_an_engine_on_a_cpu_refuses_gpu_memory():
    said = refused(SharedWeights([{ANY_GPU: HANDLE}], [GOOD]), device="cpu")
    assert said == "the weights are in the memory of a GPU, and this engine runs on cpu"
