"""Weights from a trainer on one GPU to a server on another over NCCL, in vLLM's and SGLang's formats."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.engine.distributed.test_weight_group import TWO_GPUS
from tests.server.conftest import running, tiny_config
from tests.server.http.test_bodies import error_of
from tests.server.routes.trainer.test_groups import IDS, greedy, place, specs, weights
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE
from tests.support.weight_trainer import Trainer

__all__ = ["weights"]
pytestmark = TWO_GPUS
CHUNK = 20_000  # bytes: the weights are several chunks
TRAINER, SERVER, BACKEND = "cuda:1", "cuda:0", "nccl"


@pytest.fixture(scope="module")
def process(folders):
    [file] = folders["b"].glob("*.safetensors")
    trainer = Trainer(file, BACKEND, TRAINER)
    yield trainer
    trainer.close()


@pytest.fixture
def trainer(process):
    """Have the trainer join a group and send the weights b; return the port of the group. See Trainer.send."""

    def start(name: str, **options) -> int:
        port = free_port()
        process.send(port, name, **options)
        return port

    return start


@pytest.fixture(scope="module")
def gpu_server(folders, process):
    """A server on the first GPU that needs no key from this machine."""
    settings = {"device": SERVER, "num_pages": 64, "max_num_seqs": 4, "graph_buckets": (4,)}
    with running(tiny_config(folders["a"], admin_without_key="loopback", **settings)) as handle:
        yield handle


@pytest.fixture
def server(gpu_server, folders, references):
    """The server with the weights a, whose graphs are captured; there must be no captures in the test."""
    gpu_server.answer("/update_weights_from_disk", {"model_path": str(folders["a"]), "weight_version": "a"})
    assert greedy(gpu_server) == references["a"].greedy(IDS, 12)
    captures = gpu_server.service.client.stats().graphs["captures"]
    yield gpu_server
    gpu_server.wait_idle()
    stats = gpu_server.service.client.stats()
    assert stats.graphs["captures"] == captures and stats.idle_check_failures == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("in_parts", [False, True])
def test_weights_arrive_in_vllms_format(server, trainer, weights, references, packed, in_parts):
    port = trainer("vllm", **({"packed": True, "nbytes": CHUNK} if packed else {}))
    info = place(port, packed=packed, packed_buffer_size_bytes=CHUNK)
    server.answer("/init_weight_transfer_engine", {"init_info": info})
    if in_parts:
        server.answer("/start_weight_update", {})
    server.answer("/update_weights", {"update_info": specs(weights)} | ({} if in_parts else {"weight_version": "b"}))
    if in_parts:
        assert greedy(server) == references["a"].greedy(IDS, 12)
        answer = server.answer("/finish_weight_update", {"weight_version": "b"})
        assert answer["updated"] == len(weights)
    assert server.http.get("/weight_info").json() == {"weight_version": "b"}
    assert greedy(server) == references["b"].greedy(IDS, 12)


@pytest.mark.parametrize("packed", [False, True])
def test_weights_arrive_in_sglangs_format_while_a_request_runs(server, trainer, weights, references, threads, packed):
    port = trainer("policy", **({"packed": True, "nbytes": sys.maxsize} if packed else {}))
    server.answer("/init_weights_update_group", place(port, group_name="policy", backend=BACKEND))
    sent = specs(weights)
    body = {"names": sent["names"], "dtypes": sent["dtype_names"], "shapes": sent["shapes"], "group_name": "policy"}
    body |= {"weight_version": "b"} | ({"load_format": "flattened_bucket"} if packed else {})
    running = threads.submit(generate, server, 200)
    assert server.answer("/update_weights_from_distributed", body)["weight_version"] == "b"
    check_spans(running.result(), references)
    assert greedy(server) == references["b"].greedy(IDS, 12)
    server.answer("/destroy_weights_update_group", {"group_name": "policy"})


def generate(server, count):
    body = {"token_ids": IDS, "sampling_params": {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}}
    return server.answer("/inference/v1/generate", body)["choices"][0]


def check_spans(choice, references):
    """Each span begins with the most likely tokens after all before it, under its weights alone."""
    tokens = IDS + choice["token_ids"]
    for span in choice["weight_versions"]:
        start, end = len(IDS) + span["start"], len(IDS) + min(span["end"], span["start"] + 8)
        logits = references[span["version"]].logits(tokens[:end])[start - 1 : end - 1]
        chosen = logits.gather(1, torch.tensor(tokens[start:end])[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 1e-2


@pytest.mark.parametrize("ends", ["dies", "sends nothing"])
def test_a_trainer_that_does_not_send_all_changes_nothing_and_the_next_one_can(
    server, trainer, weights, references, threads, ends
):
    port = trainer("vllm", ends=ends)
    server.answer("/init_weight_transfer_engine", {"init_info": place(port, timeout=15)})
    update = threads.submit(server.post, "/update_weights", {"update_info": specs(weights)}, timeout=PATIENCE)
    assert greedy(server) == references["a"].greedy(IDS, 12)
    error = error_of(update.result(), 400)
    assert "a transfer over the weight group failed" in error["message"]
    assert greedy(server) == references["a"].greedy(IDS, 12)
    server.answer("/init_weight_transfer_engine", {"init_info": place(trainer("vllm"))})
    server.answer("/update_weights", {"update_info": specs(weights), "weight_version": "b"})
    assert greedy(server) == references["b"].greedy(IDS, 12)
