"""Engine configuration: one frozen object, validated at construction.

Defines the names, defaults and checks of all engine settings. `resolve` in worker/sizing.py fills in the defaults that
depend on the machine and the model and returns a new object; no other part of the engine chooses a default.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError
from graph_cache.adapters.megatron.config import MegatronGraphConfig
from graph_cache.buckets import Buckets
from graph_cache.config import GraphConfig
from graph_cache.errors import GraphConfigError
from graph_cache.validation import did_you_mean, is_whole_number

DEFAULT_MODEL = "smollm2-135m-instruct"
CPU_WEIGHT_FORMATS = ("auto", "bf16", "fp32", "int4")
DTYPES = ("auto", "bfloat16", "float16", "float32")
WARMUPS = ("full", "background", "lazy")
LOGPROBS_MODES = ("processed", "raw")
LOAD_FORMATS = ("auto", "dummy")
MODES = ("inference", "training")
KERNELS = ("auto", "fused", "torch")
MAX_SPECULATIVE_TOKENS = 16
_POSITIVE_INTEGERS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "num_pages",
    "num_threads",
    "tensor_parallel_size",
)
_BOOLEANS = ("enable_prefix_caching", "async_scheduling")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes are in tokens, sequences or pages, as named; None selects a default.

    - `mode`: "training" makes an engine for a training job (docs/training.md), which uses the graph settings only.
    - `model`: the default model's name, a local folder in Hugging Face layout, a `.gguf` file, or a hub name.
    - `seed`: base seed for requests without one in an offline engine; a server uses random seeds instead.
    - `enable_prefix_caching`: reuse KV pages of prompts with the same prefix. Default: unless the model has recurrent
      state, which refuses True.
    - `async_scheduling`: enqueue each step before the previous step's tokens are read. Default: on a GPU only.
    - `num_speculative_tokens`: draft tokens per request and step, proposed by prompt lookup (n-grams) and verified by
      the model; texts are those without drafts. 0: none. Needs `async_scheduling` off, the default then.
    - `kernels`: how a GPU computes a step. "fused": the engine's own kernels; "torch": the model's layers around paged
      attention; "auto": fused for 16-bit weights on GPUs whose shared memory holds the tiles (Hopper).
    - `tensor_parallel_size`: GPUs of this host to split the model over, one process each (on a CPU: processes without
      graphs).
    - Graph settings use Megatron's names and values. Inference accepts the impls `none` and `local`. The default scope
      is `block` under `local` (Megatron's is `layer`), else `none`.

    Raises ConfigError for an invalid value.
    """

    mode: str = "inference"
    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    cpu_weight_format: str = "auto"
    num_threads: int | None = None
    tensor_parallel_size: int = 1

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.85
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    num_speculative_tokens: int = 0
    kernels: str = "auto"

    cuda_graph_impl: str = "local"
    inference_cuda_graph_scope: str | None = None
    cuda_graph_modules: tuple[str, ...] = ()
    cuda_graph_warmup_steps: int = 3
    graph_buckets: tuple[int, ...] | None = None
    warmup: str = "lazy"
    graph_manifest: str | None = None

    logprobs_mode: str = "processed"
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "dtype": DTYPES,
            "load_format": LOAD_FORMATS,
            "cpu_weight_format": CPU_WEIGHT_FORMATS,
            "warmup": WARMUPS,
            "logprobs_mode": LOGPROBS_MODES,
            "mode": MODES,
            "kernels": KERNELS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name in _POSITIVE_INTEGERS:
            value = getattr(self, name)
            if value is None and getattr(EngineConfig, name) is None:
                continue
            if not is_whole_number(value, 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        for name in _BOOLEANS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be True or False")
        if not is_whole_number(self.seed):
            raise ConfigError(f"seed={self.seed!r} must be a whole number")
        if not is_whole_number(self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS):
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} must be a whole number from 0 to "
                f"{MAX_SPECULATIVE_TOKENS}"
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={share!r} must be a number above 0 and at most 1")
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r} must be a model name, a folder or a .gguf file")
        if self.tensor_parallel_size > 1:
            self._check_tensor_parallel()
        if self.graph_buckets is not None:
            if isinstance(self.graph_buckets, str) or not isinstance(self.graph_buckets, Iterable):
                raise ConfigError(f"graph_buckets={self.graph_buckets!r} must be a list of batch sizes")
            object.__setattr__(self, "graph_buckets", tuple(self.graph_buckets))
            self._check_buckets(self.graph_buckets)
        impl = self.megatron_graph_config().cuda_graph_impl
        if self.mode == "inference" and impl not in ("none", "local"):
            raise ConfigError(
                f"cuda_graph_impl={impl!r} only captures training, so inference would run without "
                "graphs: use 'local', or 'none' to run without graphs"
            )

    def _check_tensor_parallel(self) -> None:
        setting = f"tensor_parallel_size={self.tensor_parallel_size}"
        if self.mode == "training":
            raise ConfigError(f"{setting} applies to inference only; in a training job Megatron-Core splits the model")
        if self.cpu_weight_format == "int4":
            raise ConfigError(f"cpu_weight_format='int4' does not support {setting}; use auto, bf16 or fp32")

    def _check_buckets(self, sizes: tuple[int, ...]) -> None:
        """Check graph_buckets, also against max_num_seqs once that is set (at the latest by `resolve()`)."""
        try:
            if self.max_num_seqs is None:
                Buckets(sizes)
            else:
                Buckets.for_limit(self.max_num_seqs, sizes)
        except GraphConfigError as error:
            raise ConfigError(f"graph_buckets={','.join(map(str, sizes))}: {error}") from error

    def graph_config(self) -> GraphConfig:
        """Return the graph settings of the core. Raises GraphConfigError for a combination that is not supported."""
        return self.megatron_graph_config().graph_config()

    def megatron_graph_config(self) -> MegatronGraphConfig:
        """Return the graph settings in Megatron's vocabulary, with defaults resolved and combinations checked."""
        training = self.mode == "training"
        default_scope = "block" if self.cuda_graph_impl == "local" and not training else "none"
        scope = self.inference_cuda_graph_scope or default_scope
        return MegatronGraphConfig(
            cuda_graph_impl=self.cuda_graph_impl,
            inference_cuda_graph_scope=scope,
            cuda_graph_modules=self.cuda_graph_modules,
            cuda_graph_warmup_steps=self.cuda_graph_warmup_steps,
            training=training,
            model_facts_known=not training,  # `attach` checks them against the model
        )

    @classmethod
    def from_megatron(cls, source: object, **overrides: Any) -> EngineConfig:
        """Build from the graph settings of a Megatron configuration.

        `source` is a TransformerConfig, an arguments namespace or a mapping, of any version, deprecated fields
        included. `overrides` are fields of this class and take precedence. Raises GraphConfigError for combinations
        that Megatron rejects too. Build the model itself with `cuda_graph_impl="none"`.
        """
        training = overrides.get("mode") == "training"
        # `attach` and `capture_forward_backward` check the RNG state tracker themselves.
        graphs = MegatronGraphConfig.from_megatron(
            source,
            training=training,
            **({"inference_cuda_graph_scope": "none", "use_cudagraphable_rng": True} if training else {}),
        )
        values: dict[str, Any] = {
            "cuda_graph_impl": graphs.cuda_graph_impl,
            "inference_cuda_graph_scope": graphs.inference_cuda_graph_scope,
            "cuda_graph_modules": graphs.cuda_graph_modules,
            "cuda_graph_warmup_steps": graphs.cuda_graph_warmup_steps,
        }
        return cls(**(values | overrides))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """Build from a dict of field values. Raises ConfigError for an unknown key, naming the nearest known one."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown engine setting {key!r}{did_you_mean(key, known)}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An EngineConfig in which every size is set, as `resolve` returns it."""

    max_model_len: int = field()
    max_num_seqs: int = field()
    max_num_batched_tokens: int = field()
    num_pages: int = field()
    enable_prefix_caching: bool = field()
    async_scheduling: bool = field()


def cache_folder() -> str:
    """Return the folder for downloaded and converted models: $ENCORE_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("ENCORE_CACHE") or os.path.join(base, "encore")
