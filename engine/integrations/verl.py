"""Rollouts for verl: a replica that serves with Encore, and the adapter that gives it the trainer's weights.

    VERL_USE_EXTERNAL_MODULES=engine.integrations.verl python -m verl.trainer.main_ppo \
        actor_rollout_ref.rollout.name=encore ...

verl imports this module, which registers both. A replica is a Ray actor that starts `encore serve` on the machine and
the GPUs of its workers. Weights go through files in shared memory, in parts, and are written all or not at all. Written
for verl 0.9, which must be installed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
import verl.workers.rollout.base as rollout_base
from safetensors.torch import save_file
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from engine.errors import ConfigError, EngineError

NAME = "encore"
CONTROL_CALLS = 16  # at the same time, beside those that generate
SHARED_MEMORY = "/dev/shm"
MEMORY_PARTS = ["kv_cache", "weights"]
LOOPBACK, ANY_ADDRESS = "127.0.0.1", ("0.0.0.0", "::")  # noqa: S104 (compared, not bound)
# Ray kills an actor without notice; PR_SET_PDEATHSIG (1) then ends the server with SIGTERM (15).
START = "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 15); runpy.run_module('server.cli', None, '__main__', True)"
DEVICES = "CUDA_VISIBLE_DEVICES"


def server_arguments(config: Any, model_path: str) -> list[str]:
    """Return the arguments of `encore serve` for verl's RolloutConfig. Raises ConfigError for what can't be done."""
    unsupported = {
        "data_parallel_size": config.data_parallel_size > 1,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size > 1,
        "expert_parallel_size": (config.expert_parallel_size or 1) > 1,
        "quantization": config.get("quantization", None) is not None,
        "mtp": config.get("mtp", None) is not None and config.mtp.enable and config.mtp.enable_rollout,
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"rollout.{name}={config.get(name)} is not supported by rollout.name={NAME}: leave it out"
            )
    mode = config.logprobs_mode or "processed_logprobs"
    modes = {"processed_logprobs": "processed", "raw_logprobs": "raw"}
    if mode not in modes:
        raise ConfigError(f"rollout.logprobs_mode={mode} is not supported: use one of {', '.join(modes)}")
    options: dict[str, Any] = {
        "model": model_path, "served_model_name": model_path, "dtype": config.dtype, "warmup": "full",
        "tensor_parallel_size": config.tensor_model_parallel_size, "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens, "max_model_len": config.max_model_len,
        "gpu_memory_utilization": config.gpu_memory_utilization, "logprobs_mode": modes[mode],
        "enable_sleep_mode": config.free_cache_engine or None,
        "enable_return_routed_experts": routing_replay(config) or None,
        "cuda_graph_impl": "none" if config.enforce_eager else None,
        "graph_buckets": ",".join(map(str, config.cudagraph_capture_sizes or ())) or None,
        "enable_prefix_caching": None if config.get("enable_prefix_caching", True) else False,
    }  # fmt: skip
    options |= dict((config.engine_kwargs or {}).get(NAME) or {})
    options.pop("host", None)
    found: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            found.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            found += [flag, str(value)]
    return found


def routing_replay(config: Any) -> bool:
    """Return whether verl replays the experts that the engine chose."""
    return bool(config.get("enable_rollout_routing_replay", False))


class EncoreServer:
    """The actor of a replica: a server process, and what verl's trainers call.

    - arguments: of `encore serve`, beside its address.
    - host: the address to listen on.
    - devices: CUDA_VISIBLE_DEVICES of the server; empty: as in this process.
    - limits: max_model_len, prompt_length and response_length of verl's config; see `generate`.
    - defaults: of sampling parameters.
    - num_layers: of the model, if verl replays the experts that the engine chose.
    """

    def __init__(
        self,
        arguments: list[str],
        host: str,
        devices: str,
        max_calls: int,
        limits: tuple[int | None, int, int],
        defaults: Mapping[str, Any],
        num_layers: int | None = None,
    ):
        self._arguments, self._devices, self._limits, self._defaults = arguments, devices, limits, dict(defaults)
        self._sleeps = "--enable-sleep-mode" in arguments
        self._replays_layers = num_layers  # None: routing replay is off
        self._threads = ThreadPoolExecutor(max_calls + CONTROL_CALLS)
        self._key, self._host, self._port = secrets.token_hex(16), host, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._global_steps: int | None = None

    async def launch_server(self) -> None:
        """Start the server; return when it is ready. Raises EngineError if it ends before."""
        with socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET) as probe:
            probe.bind((self._host, 0))
            self._port = probe.getsockname()[1]
        place = ["--host", self._host, "--port", str(self._port)]
        environment = (
            os.environ | {"ENCORE_ADMIN_KEYS": self._key} | ({DEVICES: self._devices} if self._devices else {})
        )
        command = [sys.executable, "-c", START, "serve", *self._arguments, *place]
        self._process = subprocess.Popen(command, env=environment)
        await self._in_thread(self._wait_until_ready)

    def get_server_address(self) -> tuple[str, int]:
        """Return the address of this machine, and the port of the OpenAI routes."""
        return ray.util.get_node_ip_address().strip("[]"), self._port

    def close(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    async def generate(
        self,
        prompt_ids: Iterable[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Generate one sequence. Without a maximum, it is what verl's lengths of prompts and responses leave.

        A request that is aborted, or refused since the replica leaves, returns the tokens so far as "aborted".
        """
        media = {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
        for name, value in media.items():
            if value:
                raise ConfigError(f"{name}: rollout.name={NAME} takes text only")
        ids, given = [int(token) for token in prompt_ids], dict(sampling_params)
        longest, prompt_length, response_length = self._limits
        most = given.pop("max_tokens", None)
        most = given.pop("max_new_tokens", None) if most is None else most
        if most is None:
            most = min(response_length, prompt_length + response_length - len(ids))
        if longest is not None:
            most = min(most, longest - len(ids))
        wants_logprobs, global_steps = bool(given.pop("logprobs", False)), self._global_steps
        given = self._defaults | given | {"max_tokens": max(1, most), "logprobs": 0 if wants_logprobs else None}
        body = {"token_ids": ids, "sampling_params": given, "request_id": request_id, "priority": priority}
        try:
            answer = await self.call("/inference/v1/generate", body)
        except ServerRefused as error:
            if error.code != "engine_paused":
                raise
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": global_steps})
        [choice] = answer["choices"]
        extra = {"global_steps": global_steps} | _steps_of(choice["weight_versions"])
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=[one["logprob"] for one in choice["logprobs"]["content"]] if wants_logprobs else None,
            routed_experts=self._experts(choice.get("routed_experts")),
            stop_reason="aborted" if choice["finish_reason"] == "abort" else "completed",
            extra_fields=extra,
        )

    def _experts(self, found: Mapping[str, Any] | None) -> np.ndarray | None:
        """Return the experts [tokens, layers, k] of an answer; verl wants all layers of the model."""
        if self._replays_layers is None or found is None:
            return None
        layers = found["shape"][1]
        if layers != self._replays_layers:
            raise ConfigError(
                f"rollout.enable_rollout_routing_replay needs experts in all {self._replays_layers} layers, found "
                f"{layers} layers with experts"
            )
        return np.frombuffer(base64.b64decode(found["data"]), np.dtype(found["dtype"])).reshape(found["shape"]).copy()

    async def set_global_steps(self, global_steps: int) -> None:
        """Take the number of the trainer's step that the weights come from."""
        self._global_steps = global_steps

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the memory of weights and KV cache, or with these tags. Without free_cache_engine nothing is done."""
        if self._sleeps:
            await self.call("/resume_memory_occupation", {"tags": tags or MEMORY_PARTS})

    async def sleep(self, tags: list[str] | None = None) -> None:
        """Release it."""
        if self._sleeps:
            await self.call("/release_memory_occupation", {"tags": tags or MEMORY_PARTS})

    async def release_kv_cache(self) -> None:
        """Release the memory of the KV cache."""
        await self.sleep(["kv_cache"])

    async def resume_kv_cache(self) -> None:
        """Restore the memory of the KV cache."""
        await self.wake_up(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Drop cached prefixes."""
        await self.call("/reset_prefix_cache", {})

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Abort what runs. New requests wait for `resume_generation`, or end at once with `reject_request`."""
        if reject_request:
            await self.call("/pause?mode=abort", {})
        else:
            await self.call("/pause_generation", {"mode": "abort"})

    async def resume_generation(self) -> None:
        """End the pause."""
        await self.call("/resume", {})

    async def start_profile(self, **kwargs: Any) -> None:
        """Refused: profile the server with its own tools."""
        raise ConfigError(f"rollout.profiler is not supported by rollout.name={NAME}: turn it off")

    async def stop_profile(self) -> None:
        """Nothing was started."""

    async def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the server. Raises ServerRefused with its message."""
        return await self._in_thread(self._post, path, body)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    @property
    def _url(self) -> str:
        host = LOOPBACK if self._host in ANY_ADDRESS else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            raise ServerRefused.of(path, error.code, error.read()) from None

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        while self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self._url}/ready").close()
                return
            except urllib.error.URLError:  # not listening yet, or 503: not ready yet
                time.sleep(0.2)
        raise EngineError(f"`encore serve` ended with status {self._process.returncode}: its log says why")


class ServerRefused(EngineError):
    """The server answered a request with an error; `code` is its code, or empty."""

    def __init__(self, message: str, code: str = ""):
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])

    @classmethod
    def of(cls, path: str, status: int, raw: bytes) -> ServerRefused:
        """Read an error's body."""
        try:
            error = json.loads(raw)["error"]
            return cls(f"{path}: {status} {error['message']}", error.get("code") or "")
        except (ValueError, KeyError, TypeError):
            return cls(f"{path}: {status} {raw[:500].decode(errors='replace')}")


def _steps_of(versions: Iterable[Mapping[str, Any]] | None) -> dict[str, int]:
    """Return the first and the last step whose weights produced tokens, as verl wants them for partial rollouts."""
    steps = [int(span["version"]) for span in versions or () if str(span["version"]).isdigit()]
    return {"min_global_steps": min(steps), "max_global_steps": max(steps)} if steps else {}


class EncoreReplica(RolloutReplica):
    """A replica on one machine.

    verl's agent loops generate through its actor. The OpenAI routes listen on 127.0.0.1 alone, unless
    rollout.engine_kwargs.encore has a `host`, and API keys or `allow_unauthenticated`.
    """

    @property
    def actor_name(self) -> str:
        """The name of the server's actor, by which the adapter finds it."""
        return _actor_name(self.replica_rank, self.is_reward_model, self.is_teacher_model, self.name_suffix)

    async def launch_servers(self) -> None:
        """Start the server on the machine of the replica's workers."""
        if self.nnodes > 1:
            raise ConfigError(
                f"rollout.tensor_model_parallel_size={self.config.tensor_model_parallel_size} needs {self.nnodes} "
                f"machines; a replica of rollout.name={NAME} runs on one: use at most {self.gpus_per_node}"
            )
        model = omega_conf_to_dataclass(self.model_config, dataclass_type=HFModelConfig)  # a trainer gives a DictConfig
        arguments, num_layers = server_arguments(self.config, model.local_path), None
        if routing_replay(self.config):
            num_layers = model.hf_config.num_hidden_layers
        places = await asyncio.gather(*[worker.__ray_call__.remote(_place) for worker in self.workers])
        devices = sorted({device for _, found in places for device in found.split(",") if device.strip()})
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=places[0][0], soft=False)
        actor = ray.remote(EncoreServer).options(
            name=self.actor_name, max_concurrency=self.max_concurrency, scheduling_strategy=affinity, num_cpus=0
        )
        limits = (self.config.max_model_len, self.config.prompt_length, self.config.response_length)
        host = ((self.config.engine_kwargs or {}).get(NAME) or {}).get("host", LOOPBACK)
        defaults = {"ignore_eos": self.config.ignore_eos, "repetition_penalty": self.config.repetition_penalty}
        if self.config.full_determinism:
            defaults["seed"] = self.replica_rank + self.config.seed
        server = actor.remote(
            arguments, host, ",".join(devices), self.config.max_num_seqs, limits, defaults, num_layers
        )
        await server.launch_server.remote()
        host, port = await server.get_server_address.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _place(_worker: Any) -> tuple[str, str]:
    """Return the machine and the devices of the worker that this runs in."""
    return ray.get_runtime_context().get_node_id(), os.environ.get(DEVICES, "")


def _actor_name(rank: int, is_reward: bool = False, is_teacher: bool = False, suffix: str = "") -> str:
    kind = "_reward" if is_reward else "_teacher" if is_teacher else ""
    return f"{NAME}_server{kind}_{rank}{suffix}"


class ServerAdapter(BaseRollout):
    """A trainer's side of a replica, in each of its workers. The first worker of a replica talks to its server.

    The environment variable RANK numbers the workers. `replica_rank`: -1: by RANK.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        rank, size = int(os.environ["RANK"]), self.config.tensor_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._actor: Any = None

    @property
    def _server(self) -> Any:
        if self._actor is None:
            self._actor = ray.get_actor(_actor_name(self.replica_rank))
        return self._actor

    async def resume(self, tags: list[str]) -> None:
        """Restore memory with these tags: weights or kv_cache."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server.wake_up.remote(tags)

    async def release(self) -> None:
        """Release the memory of weights and KV cache."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Write new weights, all or none, as version `global_steps`.

        Every worker reads all of `weights`, which gathers them from the others; the first one sends them. Raises
        ConfigError for adapters (LoRA) and other wire formats, ServerRefused for weights that don't fit the model.
        """
        if wire_format != "named_tensors":
            raise ConfigError(f"wire_format={wire_format} is not supported by rollout.name={NAME}: use another backend")
        if kwargs.get("peft_config"):
            raise ConfigError(f"rollout.name={NAME} serves no LoRA adapters: set model.lora.merge=True")
        if not self.is_leader_rank:
            async for _ in _each(weights):
                pass
            return
        limit = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        await self._server.call.remote("/start_weight_update", {})
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None) as folder:
            part: dict[str, Tensor] = {}
            size = number = 0
            async for name, tensor in _each(weights):
                part[name] = tensor.detach().to("cpu", copy=True).contiguous()
                size += part[name].nbytes
                if size >= limit:
                    await self._send(part, os.path.join(folder, f"{number}.safetensors"))
                    part, size, number = {}, 0, number + 1
            if part:
                await self._send(part, os.path.join(folder, f"{number}.safetensors"))
            version = {} if global_steps is None else {"weight_version": str(global_steps)}
            await self._server.call.remote("/finish_weight_update", version)
        if global_steps is not None:
            await self._server.set_global_steps.remote(global_steps)

    async def _send(self, part: dict[str, Tensor], file: str) -> None:
        save_file(part, file)
        await self._server.call.remote("/update_weights", {"weight_dir": file})


async def _each(
    weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
) -> AsyncIterator[tuple[str, Tensor]]:
    if isinstance(weights, AsyncIterable):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair


def _replica_class() -> type[EncoreReplica]:
    return EncoreReplica


RolloutReplicaRegistry.register(NAME, _replica_class)
rollout_base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.{ServerAdapter.__name__}"  # noqa: SLF001 (verl has no other)
