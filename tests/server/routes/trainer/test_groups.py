"""Weights from a trainer in another process, over a group, in vLLM's and SGLang's formats, and what can go wrong."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from engine.distributed.weight_group import TensorSpec, WeightGroup
from tests.server.http.test_bodies import error_of
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

IDS = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def weights(folders):
    return list(safetensors.torch.load_file(next(folders["b"].glob("*.safetensors"))).items())


def train(port: int, folder: str, name: str, packed: bool, may_send: Any, sends: bool) -> None:
    """A trainer in its own process. It sends once the event `may_send` is set."""
    [file] = folder.glob("*.safetensors")
    group = WeightGroup.join("127.0.0.1", port, rank=0, world_size=2, name=name, timeout=PATIENCE)
    assert may_send.wait(PATIENCE)
    if sends:
        group.send(safetensors.torch.load_file(file).items(), packed=packed)
    group.close()


@pytest.fixture
def trainer(folders):
    started, context = [], multiprocessing.get_context("spawn")

    def start(name: str, *, packed: bool = False, waits: bool = False, sends: bool = True) -> int:
        port = free_port()
        start.may_send = context.Event()
        if not waits:
            start.may_send.set()
        arguments = (port, folders["b"], name, packed, start.may_send, sends)
        process = context.Process(target=train, args=arguments)
        process.start()
        started.append(process)
        return port

    yield start
    for process in started:
        process.join(PATIENCE)
        process.kill()


def place(port: int, **fields) -> dict:
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2} | fields


def specs(weights) -> dict:
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype) for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
    }


def greedy(server, count: int = 12) -> list[int]:
    body = {"token_ids": IDS, "sampling_params": {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}}
    return server.answer("/inference/v1/generate", body)["choices"][0]["token_ids"]


@pytest.mark.parametrize("packed", [False, True])
def test_weights_arrive_in_vllms_format_while_requests_run(server, trainer, weights, references, threads, packed):
    port = trainer("vllm", packed=packed, waits=True)
    server.answer("/init_weight_transfer_engine", {"init_info": place(port, packed=packed)})
    update = threads.submit(server.post, "/update_weights", {"update_info": specs(weights), "weight_version": "b"})
    assert greedy(server) == references["a"].greedy(IDS, 12)  # before the tensors have arrived
    assert not update.done()
    trainer.may_send.set()
    answer = update.result()
    assert answer.status_code == 200, answer.text
    assert answer.json()["updated"] == len(weights) and answer.json()["weight_version"] == "b"
    assert greedy(server) == references["b"].greedy(IDS, 12)
    checksums = server.answer("/weight_checker", {"action": "checksum"})["checksums"]
    assert len(checksums) >= len(weights)


def broadcast(port: int, folder, name: str, world_size: int) -> None:
    """A trainer that makes its group as SGLang's test, slime and AReaL do. It calls no collective but broadcasts."""
    limit, c10d = timedelta(seconds=60), dist.distributed_c10d
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=limit))
    group, _ = c10d._new_process_group_helper(  # noqa: SLF001
        size, rank, [], dist.Backend("gloo"), dist.PrefixStore(name, store), group_name=name, timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}  # noqa: SLF001
    tensors = safetensors.torch.load_file(next(folder.glob("*.safetensors"))).values()
    for work in [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]:
        work.wait()
    dist.destroy_process_group(group)


def receive(port: int, folder, name: str, world_size: int) -> None:
    """A second engine, which must get the same tensors."""
    sent = safetensors.torch.load_file(next(folder.glob("*.safetensors")))
    group = WeightGroup.join("127.0.0.1", port, rank=2, world_size=world_size, name=name, timeout=PATIENCE)
    received = group.receive([TensorSpec(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in sent.items()])
    group.close()
    assert all(torch.equal(tensor, sent[key]) for key, tensor in received)


def test_sglangs_trainers_send_to_several_engines_and_a_group_is_left(server, weights, folders, references):
    port, processes = free_port(), []
    for target in (broadcast, receive):
        arguments = (port, folders["b"], "policy", 3)
        processes.append(multiprocessing.get_context("spawn").Process(target=target, args=arguments))
        processes[-1].start()
    sent = place(port, group_name="policy", backend="gloo", world_size=3) | {"master_port": str(port)}
    joined = server.post("/init_weights_update_group", sent, timeout=120)  # two processes start
    assert joined.status_code == 200, joined.text
    sent = specs(weights)
    body = {"names": sent["names"], "dtypes": sent["dtype_names"], "shapes": sent["shapes"], "group_name": "policy"}
    assert server.answer("/update_weights_from_distributed", body | {"weight_version": "b2"})["weight_version"] == "b2"
    assert greedy(server) == references["b"].greedy(IDS, 12)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    server.answer("/destroy_weights_update_group", {"group_name": "policy"})
    error = error_of(server.post("/update_weights_from_distributed", body), 400)
    assert error["param"] == "group_name" and "no weight group 'policy' was joined" in error["message"]


def test_leaving_a_group_waits_for_no_trainer(server, trainer, weights, references, monkeypatch):
    """Over NCCL a group ends when all have left it, and a trainer may leave after the server's answer."""
    trainer_leaves, shutdown = threading.Event(), dist.ProcessGroup.shutdown

    def shut_down(group) -> None:
        assert trainer_leaves.wait(60)
        shutdown(group)

    monkeypatch.setattr(dist.ProcessGroup, "shutdown", shut_down)
    sent = specs(weights)
    body = {"names": sent["names"], "dtypes": sent["dtype_names"], "shapes": sent["shapes"], "group_name": "policy"}
    for version in ("b", "again"):
        port = trainer("policy")
        server.answer("/init_weights_update_group", place(port, group_name="policy"))  # leaves the first one
        server.answer("/update_weights_from_distributed", body | {"weight_version": version})
        assert greedy(server) == references["b"].greedy(IDS, 12)
    server.answer("/destroy_weights_update_group", {"group_name": "policy"})
    assert greedy(server) == references["b"].greedy(IDS, 12)
    trainer_leaves.set()


def test_parts_become_visible_at_the_end_of_an_update(server, trainer, weights, references):
    port = trainer("vllm")
    server.answer("/init_weight_transfer_engine", {"init_info": place(port)})
    server.answer("/start_weight_update", {})
    server.answer("/update_weights", {"update_info": specs(weights)})
    assert greedy(server) == references["a"].greedy(IDS, 12)
    assert server.answer("/finish_weight_update", {"weight_version": "b3"})["updated"] == len(weights)
    assert greedy(server) == references["b"].greedy(IDS, 12)


def is_receiving() -> bool:
    """Whether the engine, which is in this process, waits for the trainer's tensors."""
    return any(thread.name == "encore-weights-vllm" for thread in threading.enumerate())


def test_a_part_belongs_to_the_update_in_which_it_was_announced(server, trainer, weights, references, threads):
    port = trainer("vllm", waits=True)
    server.answer("/init_weight_transfer_engine", {"init_info": place(port)})
    server.answer("/start_weight_update", {})
    part = threads.submit(server.post, "/update_weights", {"update_info": specs(weights)})
    server.wait(is_receiving, "the part")
    assert error_of(server.post("/finish_weight_update", {}), 400)["message"].startswith("1 parts of this update")
    server.answer("/start_weight_update", {})
    trainer.may_send.set()
    assert "another /start_weight_update dropped the update" in error_of(part.result(), 400)["message"]
    assert server.answer("/finish_weight_update", {"weight_version": "empty"})["updated"] == 0
    assert greedy(server) == references["a"].greedy(IDS, 12)


def test_a_whole_update_is_no_part_of_one_that_begins_while_it_arrives(server, trainer, weights, references, threads):
    port = trainer("vllm", waits=True)
    server.answer("/init_weight_transfer_engine", {"init_info": place(port)})
    body = {"update_info": specs(weights), "weight_version": "whole"}
    whole = threads.submit(server.post, "/update_weights", body)
    server.wait(is_receiving, "the update")
    server.answer("/start_weight_update", {})
    trainer.may_send.set()
    assert whole.result().json()["weight_version"] == "whole"
    assert server.answer("/finish_weight_update", {})["updated"] == 0
    assert server.http.get("/weight_info").json() == {"weight_version": "whole"}
    assert greedy(server) == references["b"].greedy(IDS, 12)


def test_a_trainer_that_goes_without_sending_changes_nothing(server, trainer, weights, references):
    port = trainer("vllm", sends=False)
    server.answer("/init_weight_transfer_engine", {"init_info": place(port, timeout=PATIENCE)})
    error = error_of(server.post("/update_weights", {"update_info": specs(weights)}), 400)
    assert "a transfer over the weight group failed" in error["message"]
    assert greedy(server) == references["a"].greedy(IDS, 12)
    error = error_of(server.post("/update_weights", {"update_info": specs(weights)}), 400)
    assert "no weight group 'vllm' was joined" in error["message"]


def die_halfway(port: int, folder) -> None:
    group = WeightGroup.join("127.0.0.1", port, rank=0, world_size=2, name="vllm", timeout=PATIENCE)
    tensors = list(safetensors.torch.load_file(next(folder.glob("*.safetensors"))).items())
    group.send(tensors[: len(tensors) // 2])
    os._exit(1)


def test_a_trainer_that_dies_halfway_changes_nothing(server, weights, folders, references):
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=die_halfway, args=(port, folders["b"]))
    process.start()
    try:
        server.answer("/init_weight_transfer_engine", {"init_info": place(port, timeout=PATIENCE)})
        error = error_of(server.post("/update_weights", {"update_info": specs(weights)}), 400)
    finally:
        process.kill()
    assert "a transfer over the weight group failed" in error["message"]
    assert greedy(server) == references["a"].greedy(IDS, 12)
    checksums = server.answer("/weight_checker", {"action": "checksum"})["checksums"]
    server.answer("/update_weights_from_disk", {"model_path": str(folders["a"])})
    assert server.answer("/weight_checker", {"action": "compare", "baseline": checksums})["match"]


def test_a_trainer_that_never_joins_blocks_no_request(server, references, threads):
    body = {"init_info": place(free_port(), timeout=4)}
    began = time.monotonic()
    joining = threads.submit(server.post, "/init_weight_transfer_engine", body)
    assert greedy(server) == references["a"].greedy(IDS, 12)
    assert not joining.done() or time.monotonic() - began >= 4
    assert "was not joined by 2 processes within 4 s" in error_of(joining.result(), 400)["message"]


def test_a_trainer_that_was_started_again_need_not_wait_for_its_earlier_call(
    server, trainer, weights, references, threads
):
    body = {"init_info": place(free_port(), timeout=12)}
    lost = threads.submit(server.post, "/init_weight_transfer_engine", body)
    port = trainer("vllm")
    server.answer("/init_weight_transfer_engine", {"init_info": place(port)})
    server.answer("/update_weights", {"update_info": specs(weights), "weight_version": "b"})
    assert greedy(server) == references["b"].greedy(IDS, 12)
    assert "was not joined by 2 processes within 12 s" in error_of(lost.result(), 400)["message"]
    server.answer("/destroy_weights_update_group", {"group_name": "vllm"})


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/init_weight_transfer_engine", {"init_info": place(70000)}, "master_port"),
        ("/init_weight_transfer_engine", {"init_info": place(29500, rank_offset=2)}, "world_size=2 is invalid"),
        ("/init_weight_transfer_engine", {"init_info": place(29500, pakced=True)}, "did you mean 'packed'"),
        ("/init_weights_update_group", place(29500, backend="mpi"), "backend"),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": [], "shapes": [[1]]}}, "names"),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["x"], "shapes": [[1]]}, "dtype_names[0]='x'"),
    ],
)
def test_wrong_bodies_are_refused(server, path, body, said):
    assert said in error_of(server.post(path, body), 400)["message"]


@pytest.mark.parametrize("shape", [[1 << 44], [1 << 40, 1 << 40]])
def test_tensors_that_no_memory_holds_are_refused(server, trainer, references, shape):
    port = trainer("vllm", sends=False)
    server.answer("/init_weight_transfer_engine", {"init_info": place(port, timeout=20)})
    info = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [shape]}
    error = error_of(server.post("/update_weights", {"update_info": info}), 400)
    assert "GiB of new weights beside the old ones: check the shapes" in error["message"]
    assert greedy(server) == references["a"].greedy(IDS, 12)


def send_misfits(port: int) -> None:
    group = WeightGroup.join("127.0.0.1", port, rank=0, world_size=2, name="vllm", timeout=PATIENCE)
    group.send([("model.norm.weight", torch.ones(3)), ("model.nrom.weight", torch.ones(3))])
    group.close()


def test_tensors_of_another_shape_are_refused_and_change_nothing(server, references):
    port, names = free_port(), ["model.norm.weight", "model.nrom.weight"]
    process = multiprocessing.get_context("spawn").Process(target=send_misfits, args=(port,))
    process.start()
    server.answer("/init_weight_transfer_engine", {"init_info": place(port)})
    info = {"names": names, "dtype_names": ["float32"] * 2, "shapes": [[3], [3]]}
    message = error_of(server.post("/update_weights", {"update_info": info}), 400)["message"]
    process.join(PATIENCE)
    assert all(name in message for name in names)
    assert greedy(server) == references["a"].greedy(IDS, 12)
