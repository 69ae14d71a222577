"""Weights sent from a trainer's process over a process group: what arrives, and what happens if nothing does."""

import multiprocessing
import os
import time

import pytest
import torch

from engine.distributed.weight_group import TensorSpec, WeightGroup, chunks, tensor_specs
from engine.errors import RequestError, WeightUpdateError
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

CHUNK = 100  # bytes: most chunks hold two tensors
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices: torch.cuda.device_count() is {GPUS}"),
]
BACKENDS = ["gloo", pytest.param("nccl", marks=TWO_GPUS)]
DEVICES = {"gloo": ("cpu", "cpu"), "nccl": ("cuda:1", "cuda:0")}  # of the trainer and of the receiver


def weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float16, torch.float8_e4m3fn)
    return [
        (f"t{index}", (9 * torch.rand(3 + index, 5, generator=generator)).to(dtypes[index % 5])) for index in range(10)
    ] + [("scalar", torch.tensor(0.5)), ("empty", torch.empty(0, 4))]


def train(port: int, backend: str, ends: str) -> None:
    """A trainer that sends its weights once as they are and once packed, then goes; or does what `ends` says."""
    device = DEVICES[backend][0]
    group = WeightGroup.join("127.0.0.1", port, rank=0, world_size=2, backend=backend, device=device, timeout=PATIENCE)
    if ends == "sends nothing":
        time.sleep(3600)  # until it is killed
    elif ends == "dies":
        group.send(weights()[:5])
        os._exit(1)
    else:
        group.send(weights())
        group.send(weights(), packed=True, nbytes=CHUNK)
    group.close()


@pytest.fixture
def trainer():
    """Start a trainer and return the group that it is in."""
    started = []

    def start(backend: str, ends: str, timeout: float) -> WeightGroup:
        port, device = free_port(), DEVICES[backend][1]
        process = multiprocessing.get_context("spawn").Process(target=train, args=(port, backend, ends))
        process.start()
        started.append(process)
        return WeightGroup.join(
            "127.0.0.1", port, rank=1, world_size=2, backend=backend, device=device, timeout=timeout
        )

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_arrive_bit_for_bit_one_by_one_and_packed(trainer, backend):
    group, sent = trainer(backend, "", PATIENCE), weights()
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent]
    for options in ({}, {"packed": True, "nbytes": CHUNK}):
        received = group.receive(specs, **options)
        assert [name for name, _ in received] == [name for name, _ in sent]
        for (_, tensor), (_, expected) in zip(received, sent, strict=True):
            assert str(tensor.device) == DEVICES[backend][1] and tensor.dtype == expected.dtype
            assert torch.equal(tensor.reshape(-1).view(torch.uint8).cpu(), expected.reshape(-1).view(torch.uint8))
    group.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trainer_that_joins_and_never_sends_is_an_error_after_the_timeout(trainer, backend):
    group = trainer(backend, "sends nothing", PATIENCE)
    group.set_timeout(1.5)
    fails(group, [TensorSpec("a", torch.float32, (4,))])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trainer_that_dies_between_two_tensors_is_an_error(trainer, backend):
    group, sent = trainer(backend, "dies", PATIENCE), weights()
    group.set_timeout(10)
    fails(group, [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent])


def fails(group: WeightGroup, specs: list[TensorSpec]) -> None:
    """Check that receiving raises, also while the trainer lives, and that this process and its device go on."""
    with pytest.raises(WeightUpdateError, match="a transfer over the weight group failed"):
        group.receive(specs)
    group.close()
    if GPUS:
        torch.cuda.synchronize()  # no transfer is left on the GPU
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


@pytest.mark.gpu
def test_weights_that_do_not_fit_beside_the_old_ones_are_refused_before_they_come():
    group = WeightGroup(None, None, torch.device("cuda"))
    specs = [TensorSpec("a", torch.float32, (1 << 40,))]
    for packed in (False, True):
        with pytest.raises(WeightUpdateError, match=r"no room for 4096.00 GiB .* lower gpu_memory_utilization"):
            group.receive(specs, packed=packed)


def test_a_trainer_that_never_joins_is_an_error_after_the_timeout():
    with pytest.raises(WeightUpdateError, match=r"'late' at 127.0.0.1:\d+ was not joined by 2 processes within 1 s"):
        WeightGroup.join("127.0.0.1", free_port(), rank=1, world_size=2, timeout=1, name="late")


def test_chunks_end_with_the_tensor_that_fills_them():
    specs = [TensorSpec(str(size), torch.float32, (size,)) for size in (10, 20, 1, 1, 30, 2)]
    names = [[spec.name for spec in chunk] for chunk in chunks(specs, 100)]
    assert names == [["10", "20"], ["1", "1", "30"], ["2"]]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((["a"], [], [[1]]), "found 1 names, 0 dtype_names and 1 shapes"),
        ((["a", "b"], ["float32", "complex64"], [[1], [1]]), r"dtype_names\[1\]='complex64' is not supported"),
        ((["a"], ["torch.bfloat16"], [[2, -1]]), r"shapes\[0\]=\[2, -1\] has a negative size"),
    ],
)
def test_wrong_specs_are_refused_by_entry(lists, message):
    with pytest.raises(RequestError, match=message):
        tensor_specs(*lists)


def test_a_backend_that_does_not_fit_the_device_is_refused():
    with pytest.raises(RequestError, match="backend='nccl' can't send tensors on cpu: use gloo"):
        WeightGroup.join("127.0.0.1", 1, rank=1, world_size=2, backend="nccl")
