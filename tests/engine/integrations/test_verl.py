"""The replica and the adapter for verl 0.9, called as its trainers call them. Needs verl and Ray, no GPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

pytest.importorskip("verl", reason="the adapters implement verl's interfaces")
pytest.importorskip("ray")

import ray
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

import engine.integrations.verl as adapters
from engine.errors import ConfigError
from engine.integrations.local_ray import start_ray
from server.cli.main import command_parser
from tests.engine.lively import Reference

pytestmark = pytest.mark.filterwarnings("ignore")  # verl's own
IDS = [40, 41, 42, 43]
GREEDY = {"temperature": 0.0, "logprobs": True, "ignore_eos": True}


def rollout_config(**changes) -> RolloutConfig:
    values = {
        "name": "encore", "tensor_model_parallel_size": 1, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8,
        "max_num_batched_tokens": 256, "prompt_length": 64, "response_length": 12,
        "checkpoint_engine": CheckpointEngineConfig(update_weights_bucket_megabytes=0),  # a part per tensor
        "engine_kwargs": {"encore": {"num_threads": 1, "graph_manifest": "none", "warmup": "lazy"}},
    }  # fmt: skip
    return RolloutConfig(**(values | changes))


@ray.remote(num_cpus=0)
class Worker:
    """A worker of verl's, of which a replica asks the machine and the devices."""


@pytest.fixture(scope="module")
def cluster():
    start_ray(2)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def replica(cluster, lively_model):
    config = rollout_config()
    target = f"{HFModelConfig.__module__}.{HFModelConfig.__qualname__}"
    model = OmegaConf.create({"_target_": target, "path": str(lively_model)})  # as a trainer gives it
    made = get_rollout_replica_class("encore")(0, config, model, gpus_per_node=1)
    made.workers = [Worker.remote()]
    asyncio.run(made.launch_servers())
    yield made
    ray.get(made.server_handle.close.remote())


@pytest.fixture
def adapter(replica, lively_model, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    return get_rollout_class("encore")(
        config=replica.config, model_config=HFModelConfig(path=str(lively_model)), device_mesh=None
    )


def generate(replica, **params):
    return ray.get(
        replica.server_handle.generate.remote(
            request_id="a", prompt_ids=IDS, sampling_params=GREEDY | params, image_data=None, video_data=None
        )
    )


def tensors(folder):
    return load_file(next(folder.glob("*.safetensors")))


def test_both_are_registered_and_complete():
    assert issubclass(get_rollout_replica_class("encore"), RolloutReplica)
    assert get_rollout_class("encore") is adapters.ServerAdapter and issubclass(adapters.ServerAdapter, BaseRollout)
    assert not adapters.EncoreReplica.__abstractmethods__ and not adapters.ServerAdapter.__abstractmethods__


def test_a_rollout_equals_transformers(replica, lively_model):
    reference = Reference(lively_model)
    output = generate(replica)
    assert output.token_ids == reference.greedy(IDS, 12) and output.stop_reason == "completed"
    expected = reference.logprobs([*IDS, *output.token_ids])[len(IDS) - 1 : -1]
    chosen = expected.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.log_probs), chosen, atol=1e-4, rtol=0)
    assert len(generate(replica, max_tokens=5).token_ids) == len(generate(replica, max_new_tokens=5).token_ids) == 5
    assert generate(replica, logprobs=False).log_probs is None
    assert replica.server_address.rpartition(":")[2].isdigit()


def test_weights_are_written_in_parts_and_named_by_the_step(replica, adapter, lively_model, other_model):
    asyncio.run(adapter.update_weights(iter(tensors(other_model).items()), global_steps=7))
    output = generate(replica)
    assert output.token_ids == Reference(other_model).greedy(IDS, 12)
    steps = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7}
    assert output.extra_fields == steps

    async def arriving():
        for pair in tensors(lively_model).items():
            yield pair

    asyncio.run(adapter.update_weights(arriving(), global_steps=8))
    assert generate(replica).token_ids == Reference(lively_model).greedy(IDS, 12)


def test_refused_weights_change_nothing(replica, adapter, lively_model):
    broken = tensors(lively_model)
    broken["model.norm.weight"] = torch.full_like(broken["model.norm.weight"], float("nan"))
    with pytest.raises(Exception, match="model.norm.weight"):
        asyncio.run(adapter.update_weights(iter(broken.items()), global_steps=9))
    assert generate(replica).token_ids == Reference(lively_model).greedy(IDS, 12)
    for options in ({"wire_format": "delta_flush"}, {"peft_config": {"r": 8}}):
        with pytest.raises(ConfigError, match="encore"):
            asyncio.run(adapter.update_weights(iter(()), **options))


def test_memory_is_released_and_restored(replica, adapter, lively_model):
    asyncio.run(adapter.release())
    asyncio.run(adapter.resume(["weights"]))
    asyncio.run(adapter.update_weights(iter(tensors(lively_model).items()), global_steps=10))
    asyncio.run(adapter.resume(["kv_cache"]))
    assert generate(replica).token_ids == Reference(lively_model).greedy(IDS, 12)
    for call in (replica.sleep, replica.wake_up, replica.release_kv_cache, replica.resume_kv_cache):
        asyncio.run(call())
    asyncio.run(replica.clear_kv_cache())
    assert generate(replica).token_ids == Reference(lively_model).greedy(IDS, 12)


def test_requests_are_aborted_with_their_tokens_and_new_ones_are_held_or_refused(replica):
    running = replica.server_handle.generate.remote(
        request_id="long", prompt_ids=IDS, sampling_params=GREEDY | {"max_tokens": 250}
    )
    ray.wait([running], timeout=0.05)
    asyncio.run(replica.abort_all_requests())
    output = ray.get(running)
    assert output.stop_reason == "aborted" and len(output.token_ids) < 250
    held = replica.server_handle.generate.remote(request_id="held", prompt_ids=IDS, sampling_params=GREEDY)
    assert ray.wait([held], timeout=0.3)[0] == []
    asyncio.run(replica.resume_generation())
    assert ray.get(held).stop_reason == "completed"
    asyncio.run(replica.abort_all_requests(reject_request=True))
    refused = generate(replica)
    assert refused.stop_reason == "aborted" and refused.token_ids == []
    asyncio.run(replica.resume_generation())
    assert generate(replica).stop_reason == "completed"


@pytest.mark.parametrize(
    "changes",
    [
        {"data_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"logprobs_mode": "raw_logits"},
        {"expert_parallel_size": 2, "tensor_model_parallel_size": 2}, {"quantization": "fp8"},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_served_are_refused_by_name(changes):
    with pytest.raises(ConfigError, match=f"rollout.{next(iter(changes))}"):
        adapters.server_arguments(rollout_config(**changes), "folder")


def test_settings_become_flags_of_the_server():
    config = rollout_config(
        enforce_eager=True, free_cache_engine=False, enable_prefix_caching=False, cudagraph_capture_sizes=[1, 8],
        engine_kwargs={"encore": {"kv_cache_dtype": "fp8_e4m3", "host": "0.0.0.0"}},
    )  # fmt: skip
    found = adapters.server_arguments(config, "folder")
    parsed = command_parser("serve").parse_args(found)
    assert parsed.kv_cache_dtype == "fp8_e4m3" and parsed.cuda_graph_impl == "none"
    assert parsed.enable_prefix_caching is False and parsed.graph_buckets == (1, 8)
    assert "--enable-sleep-mode" not in found and "--host" not in found
    assert "--enable-sleep-mode" in adapters.server_arguments(rollout_config(), "folder")


def test_verl_imports_the_module_by_its_name():
    code = (
        "import verl; from verl.workers.rollout.replica import get_rollout_replica_class as get; print(get('encore'))"
    )
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "engine.integrations.verl"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "EncoreReplica" in done.stdout, done.stderr
