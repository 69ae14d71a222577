"""One tensor-parallel rank of a model: validation, process groups, weights and the engine loop.

Every rank runs this code with the same ShardPlan. leader.py starts the ranks and sends them calls.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.checkpoint.source import ModelSource
from engine.config import EngineConfig, ResolvedConfig
from engine.core.builder import Loop, choose_device, choose_format, make_loop
from engine.distributed.collectives import TensorParallelCollectives
from engine.errors import ConfigError, ModelError
from engine.layers.weight_slot import Slot
from engine.megatron.checkpoint import load_checkpoint
from engine.megatron.config import gpt_model_arguments, transformer_config_values
from engine.megatron.model import MegatronModel
from engine.models.config import ModelConfig
from engine.models.registry import config_from_folder
from engine.worker.sizing import resolve
from graph_cache.manifest import Manifest

logger = logging.getLogger(__name__)

RENDEZVOUS_SECONDS = 300.0  # how much later than another a rank may reach the rendezvous
LEAVE_SECONDS = 2.0  # limit for destroying the groups; after it they end with the process
# All ranks are processes of this host, so only loopback connections are allowed. A lost rank is detected through its
# pipe; torch's own error handling would abort the process when a communicator breaks.
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Picklable values from which each rank builds its shard. `device` is rank 0's."""

    config: EngineConfig
    source: ModelSource
    spec: ModelConfig
    weight_format: str
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    device: torch.device
    threads: int

    @property
    def ranks(self) -> int:
        return self.config.tensor_parallel_size


def plan_shards(config: EngineConfig, source: ModelSource, eos_token_ids: tuple[int, ...]) -> ShardPlan:
    """Validate a configuration with tensor_parallel_size > 1 and return its plan, before any process is started.

    Raises ConfigError or ModelError for every failure that can be detected now: too few GPUs, a GGUF file, sizes that
    can't be split, a model that Megatron-Core can't express, or torch.distributed initialised in this process already.
    """
    setting = f"tensor_parallel_size={config.tensor_parallel_size}"
    if source.kind != "hf":
        raise ModelError(
            f"{source.name} is a GGUF file, found {setting}: give a folder in Hugging Face layout, or leave "
            "tensor_parallel_size out"
        )
    device = choose_device(config.device)
    if device.type == "cuda":
        count, last = torch.cuda.device_count(), device.index + config.tensor_parallel_size - 1
        if last >= count:
            raise ConfigError(
                f"{setting} starting at {device} needs GPU {last}, and torch sees {count} GPUs; "
                "lower tensor_parallel_size, or device"
            )
    spec = config_from_folder(source.path)
    transformer_config_values(spec)
    if problems := _indivisible(spec, config.tensor_parallel_size):
        raise ModelError(f"{source.name} can't be split with {setting}: {'; '.join(problems)}")
    if dist.is_initialized():
        raise ConfigError(
            f"{setting} needs process groups of its own, and this process has initialised "
            "torch.distributed already; start the engine in another process (encore serve does)"
        )
    weight_format, dtype = choose_format(config, spec, device, False)
    resolve(dataclasses.replace(config, num_pages=config.num_pages or 2), spec, device, dtype)  # rejects invalid sizes
    eos_ids = tuple(dict.fromkeys((*spec.eos_token_ids, *eos_token_ids)))
    return ShardPlan(
        config=_without_cpu_graphs(config, device),
        source=source,
        spec=spec,
        dtype=dtype,
        eos_token_ids=eos_ids,
        weight_format=weight_format,
        device=device,
        threads=config.num_threads or max(1, torch.get_num_threads() // config.tensor_parallel_size),
    )


class Shard:
    """One rank: its process groups, its shard of the model and its loop.

    Call the methods in the order in which they are defined.
    """

    def __init__(self, plan: ShardPlan, rank: int):
        from graph_cache.adapters.megatron import model  # takes seconds, in parallel on all ranks

        self.plan, self.rank, self._megatron = plan, rank, model
        self._has_joined = False
        self._group: dist.ProcessGroup | None = None
        self._model: MegatronModel | None = None
        self._sized: ResolvedConfig | None = None
        self._collectives: TensorParallelCollectives | None = None
        if plan.device.type == "cuda":
            self.device = torch.device("cuda", plan.device.index + rank)
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)  # an unusable GPU fails here, before other ranks wait for this one
        else:
            self.device = plan.device
            self._threads = torch.get_num_threads()
            torch.set_num_threads(plan.threads)

    def join(self, rendezvous: str) -> None:
        """Initialise the process groups through the file `rendezvous`.

        The path must be the same for all ranks, must not exist yet, and must stay until `leave`.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # `join` may run in another thread, and the device is set per thread
        store = dist.FileStore(rendezvous, self.plan.ranks)
        store.set_timeout(timedelta(seconds=RENDEZVOUS_SECONDS))
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._has_joined = True
        with _environment(_ENVIRONMENT):
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.plan.ranks)
            self._group = self._megatron.split_tensors(self.plan.ranks)
            # The first collective connects the ranks. That can't be captured, and it takes memory that must be gone
            # before the KV cache is sized.
            dist.all_reduce(torch.ones(1, device=self.device), group=self._group)

    def load(self) -> int:
        """Load this rank's weights and return the number of KV pages that fit in its memory."""
        plan = self.plan
        arguments = gpt_model_arguments(plan.spec)
        arguments["vocab_size"] = -(-plan.spec.vocab_size // plan.ranks) * plan.ranks
        gpt = self._megatron.empty_gpt_model(
            transformer_config_values(plan.spec), arguments, ranks=plan.ranks, dtype=plan.dtype, device=self.device
        )
        if plan.config.load_format != "dummy":
            load_checkpoint(gpt, plan.source.path, self.rank, plan.ranks)
        model = self._model = MegatronModel(gpt, plan.config.max_model_len, plan.spec.vocab_size)
        if plan.config.load_format == "dummy":
            load_random(model.weight_slots(), plan.config.seed, self.device)
        self._sized = resolve(plan.config, model.config, self.device, plan.dtype)
        return self._sized.num_pages

    def loop(self, num_pages: int, manifest: Manifest | None, make: Callable[..., Loop]) -> Loop:
        """Build this rank's loop with `make`. A collective call: all ranks must call it together.

        `num_pages` and `manifest` must be the same on all ranks, because every decision of the loops follows from them.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # as in `join`
        plan, model = self.plan, self._model
        if model is None:
            raise RuntimeError("call load() before loop()")
        sized = dataclasses.replace(self.sized, num_pages=num_pages)
        loop = make_loop(sized, model, plan.source.name, plan.eos_token_ids, plan.weight_format, manifest, make)
        self._collectives = loop.runner.step_model.collectives
        loop.runner.cache.must_capture = (
            True  # graphs hold collectives: if one rank fell back to eager, the others would hang
        )
        return loop

    @property
    def sized(self) -> ResolvedConfig:
        """The configuration with all sizes resolved for this rank's memory."""
        if self._sized is None:
            raise RuntimeError("call load() before sized")
        return self._sized

    def abandon(self) -> None:
        """Abort GPU work that waits for a lost rank. May block, so call it from a separate thread.

        Does nothing with gloo, where a broken connection raises at once.
        """
        group, collectives = self._group, self._collectives
        if group is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if collectives is not None:
                collectives.abandon()
            group.abort()

    def leave(self) -> None:
        """Destroy the process groups. Drop the graphs first: a communicator waits for graphs that captured it."""
        if self.device.type == "cpu":
            torch.set_num_threads(self._threads)
        if not self._has_joined or not dist.is_initialized():
            return
        self._megatron.forget_groups()
        self._group = self._collectives = None
        thread = threading.Thread(target=self._destroy, daemon=True, name="encore-leave")
        thread.start()
        thread.join(LEAVE_SECONDS)
        if thread.is_alive():
            logger.error(
                "rank %d: the process groups were not destroyed within %.0f s; they end with this process",
                self.rank,
                LEAVE_SECONDS,
            )

    def _destroy(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread's default is GPU 0, where this rank must not allocate
        dist.destroy_process_group()


def load_random(slots: Mapping[str, Slot], seed: int, device: torch.device) -> None:
    """Fill a model's parameters with random weights: norms 1, all others normal with standard deviation 0.02.

    Each whole tensor is generated on `device` from the seed and its name, so a shard's values do not depend on the
    number of ranks. CPU and GPU values differ.
    """
    for name, slot in slots.items():
        weight = torch.ones(slot.shape, dtype=slot.dtype, device=device)
        if not name.endswith("norm.weight"):
            generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
            weight.normal_(0.0, 0.02, generator=generator)
        slot.write(weight)


def _indivisible(spec: ModelConfig, ranks: int) -> list[str]:
    sizes = {
        "attention heads": spec.num_heads,
        "key and value heads": spec.num_kv_heads,
        "MLP columns": spec.intermediate_size,
    }
    return [f"its {size} {name} are not a multiple of {ranks}" for name, size in sizes.items() if size % ranks]


def _without_cpu_graphs(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Disable graphs on a CPU: the CPU tape can't record gloo collectives."""
    if device.type != "cpu" or config.graph_config().inference_cuda_graph_scope == "none":
        return config
    logger.warning(
        "tensor_parallel_size=%d on a CPU: its collectives can't be captured there, so all steps run eager",
        config.tensor_parallel_size,
    )
    return dataclasses.replace(config, inference_cuda_graph_scope="none")


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables that are not set yet, for the duration of the block."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
