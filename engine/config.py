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
from engine.kv_events_config import KVEventsConfig
from engine.training_config import TRAINING_ONLY, TrainingConfig, check_share
from graph_cache.adapters.megatron.config import MegatronGraphConfig
from graph_cache.config import DEFAULT_SHARE, GraphConfig
from graph_cache.core.buckets import Buckets
from graph_cache.errors import GraphConfigError
from graph_cache.utils.validation import NamesFields, did_you_mean, is_whole_number

DEFAULT_MODEL = "smollm2-135m-instruct"
QUANTIZATIONS = ("fp8", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")
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
_BOOLEANS = (
    "enable_prefix_caching",
    "async_scheduling",
    "enable_return_hidden_states",
    "enable_return_routed_experts",
    "enable_sleep_mode",
    "keep_stale_kv",
    "progress",
)


class _OfMode(NamesFields):
    """Returns a TrainingConfig for `mode="training"`, and refuses settings of the other mode by their names."""

    def __new__(cls, **values: Any) -> Any:
        if cls is EngineConfig and values.get("mode") == "training":
            return TrainingConfig(**_of_training(values))
        for name in TRAINING_ONLY:
            if name in values:
                raise ConfigError(
                    f"{name}={values[name]!r} is for training, found mode={values.get('mode', 'inference')!r}: leave "
                    "it out, or set mode='training'"
                )
        return super().__new__(cls, **values)


def _of_training(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a training job. Raises ConfigError for a setting of inference, unless at its default."""
    found, known = {}, {field.name for field in dataclasses.fields(TrainingConfig)}
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig) if field.name not in known}
    for name, value in values.items():
        if name not in defaults:
            found[name] = value
        elif value != defaults[name]:
            hint = "; in a training job Megatron-Core splits the model" if name == "tensor_parallel_size" else ""
            raise ConfigError(f"{name}={value!r} is for inference, found mode='training'{hint}: leave it out")
    return found


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_OfMode):
    """Settings of one engine. Sizes are in tokens, sequences or pages, as named; None selects a default.

    - `mode`: "training" makes a TrainingConfig, for a training job (docs/training.md). It has the graph settings only,
      and settings of training that are no fields here.
    - `model`: the default model's name, a local folder in Hugging Face layout, a `.gguf` file, or a hub name.
    - `generation_config`: where a server takes the sampling parameters that a request leaves out. "auto": the model's
      generation_config.json, or what its .gguf file says; "engine": the defaults of SamplingParams; or a folder with a
      generation_config.json. SamplingParams given in Python keep their own defaults.
    - `quantization`: quantise the linear layers of a plain checkpoint while it loads. None: store weights as the
      checkpoint does, which may be quantised already (docs/quantisation.md).
    - `cpu_weight_format`: the earlier name of `quantization` on a CPU: "int4"; or "bf16" or "fp32", as with `dtype`.
    - `kv_cache_dtype`: how keys and values are stored: "auto", in the model's dtype; "fp8_e4m3" or "fp8_e5m2", rounded
      to one byte, without scales, and saturated at 448 or 57,344.
    - `seed`: base seed for requests without one in an offline engine; a server uses random seeds instead.
    - `progress`: show on standard error how far loading, captures and `Engine.generate` are: bars on a terminal, lines
      elsewhere.
    - `enable_prefix_caching`: reuse KV pages of prompts with the same prefix. Default: unless the model has recurrent
      state, which refuses True.
    - `kv_events_config`: publish over ZeroMQ which prefixes the KV cache holds, for routers: a KVEventsConfig, or its
      values as a dict or JSON (docs/kv-cache.md). None: off.
    - `kv_offloading_size`: GiB of host memory, over all ranks, for pages that the prefix cache evicts; a prompt that
      needs them again copies them back (docs/kv-cache.md). None: off.
    - `kv_offloading_disk_path`, `kv_offloading_disk_size`: a folder, and the GiB that files may take there, to which
      those pages are written too; they outlive the engine. Needs `kv_offloading_size`. None: off.
    - `async_scheduling`: enqueue each step before the previous step's tokens are read. Default: on a GPU only.
    - `num_speculative_tokens`: draft tokens per request and step, proposed by prompt lookup (n-grams) and verified by
      the model; texts are those without drafts. 0: none. Needs `async_scheduling` off, the default then.
    - `enable_return_hidden_states`: allow requests with `return_hidden_states`; decode steps then keep them.
    - `enable_return_routed_experts`: allow requests with `return_routed_experts`, and record the experts of each token
      in each step. The model must have layers with experts.
    - `enable_sleep_mode`: allow `sleep` to release the memory of weights, KV cache and graphs (docs/rl.md). On a GPU
      it is then allocated as virtual memory, so that addresses stay, which needs a C compiler.
    - `keep_stale_kv`: after an update of the weights, running requests go on with keys and values of the weights before
      (docs/rl.md). Otherwise these are computed again. Prefixes of earlier weights are never reused.
    - `score_tokens`: the two tokens, such as ("no", "yes"), whose logits after a query and a document say how well they
      match; for rerankers without a classification head. Default: as the model's folder says, else none.
    - `score_template`: a file with the Jinja template of a query and a document. Default: as the model's folder says,
      else the one of Qwen3-Reranker with `score_tokens`, none without.
    - `kernels`: how a GPU computes a step. "fused": the engine's own kernels; "torch": the model's layers around paged
      attention; "auto": fused for 16-bit weights on GPUs whose shared memory holds the tiles (Hopper).
    - `num_threads`: threads of a step on a CPU, which may change results in the last bits. Default: PyTorch's number,
      and fewer while other processes keep the cores busy; fixed if OMP_NUM_THREADS or MKL_NUM_THREADS is set.
    - `tensor_parallel_size`: GPUs of this host to split the model over, one process each (on a CPU: processes without
      graphs).
    - Graph settings use Megatron's names and values. Inference accepts the impls `none` and `local`. The default scope
      is `block` under `local` (Megatron's is `layer`), else `none`.
    - `graph_shadow_check_share`: share of the time in which replays are compared with eager steps, beside the first one
      of each graph (docs/graph-cache.md). 0: replays are never compared.

    Raises ConfigError for an invalid value.
    """

    mode: str = "inference"
    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    generation_config: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
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
    kv_events_config: KVEventsConfig | None = None
    kv_offloading_size: float | None = None
    kv_offloading_disk_path: str | None = None
    kv_offloading_disk_size: float | None = None
    async_scheduling: bool | None = None
    num_speculative_tokens: int = 0
    enable_return_hidden_states: bool = False
    enable_return_routed_experts: bool = False
    enable_sleep_mode: bool = False
    keep_stale_kv: bool = False
    score_tokens: tuple[str, ...] = ()
    score_template: str | None = None
    kernels: str = "auto"

    cuda_graph_impl: str = "local"
    inference_cuda_graph_scope: str | None = None
    graph_buckets: tuple[int, ...] | None = None
    warmup: str = "lazy"
    graph_manifest: str | None = None
    graph_shadow_check_share: float = DEFAULT_SHARE

    logprobs_mode: str = "processed"
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        choices = {
            "dtype": DTYPES,
            "load_format": LOAD_FORMATS,
            "cpu_weight_format": CPU_WEIGHT_FORMATS,
            "kv_cache_dtype": KV_CACHE_DTYPES,
            "warmup": WARMUPS,
            "logprobs_mode": LOGPROBS_MODES,
            "mode": MODES,
            "kernels": KERNELS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization={self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}; a quantised checkpoint "
                "needs no setting"
            )
        if self.quantization is not None and self.cpu_weight_format != "auto":
            raise ConfigError(
                f"quantization={self.quantization!r} and cpu_weight_format={self.cpu_weight_format!r} both choose how "
                "weights are stored: leave cpu_weight_format out"
            )
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
        check_share(self.graph_shadow_check_share)
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r} must be a model name, a folder or a .gguf file")
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ConfigError(
                f"generation_config={self.generation_config!r} must be auto, engine, or a folder with a "
                "generation_config.json"
            )
        self._check_scores()
        self._check_kv_events()
        self._check_kv_offloading()
        if self.graph_buckets is not None:
            if isinstance(self.graph_buckets, str) or not isinstance(self.graph_buckets, Iterable):
                raise ConfigError(f"graph_buckets={self.graph_buckets!r} must be a list of batch sizes")
            object.__setattr__(self, "graph_buckets", tuple(self.graph_buckets))
            self._check_buckets(self.graph_buckets)
        graphs = self.megatron_graph_config()
        impl = graphs.cuda_graph_impl
        object.__setattr__(self, "cuda_graph_impl", impl)  # a deprecated value is replaced
        if graphs.inference_cuda_graph_scope != _default_scope(impl):
            object.__setattr__(self, "inference_cuda_graph_scope", graphs.inference_cuda_graph_scope)
        if impl not in ("none", "local"):
            raise ConfigError(
                f"cuda_graph_impl={impl!r} only captures training, so inference would run without graphs: use 'local', "
                "or 'none' to run without graphs"
            )

    @property
    def requested_quantization(self) -> str | None:
        """What `quantization` or its alias asks for."""
        return "int4" if self.cpu_weight_format == "int4" else self.quantization

    def _check_scores(self) -> None:
        tokens, template = self.score_tokens, self.score_template
        is_list = isinstance(tokens, list | tuple) and all(isinstance(one, str) and one for one in tokens)
        if not is_list or len(tokens) not in (0, 2) or len(set(tokens)) != len(tokens):
            raise ConfigError(f"score_tokens={tokens!r} must be two different tokens, those for no and for yes")
        object.__setattr__(self, "score_tokens", tuple(tokens))
        if template is not None and (not isinstance(template, str) or not template):
            raise ConfigError(f"score_template={template!r} must be a file with a template")

    def _check_kv_events(self) -> None:
        if self.kv_events_config is None:
            return
        events = KVEventsConfig.of(self.kv_events_config)
        object.__setattr__(self, "kv_events_config", events)
        if not events.is_on:
            return
        if self.enable_prefix_caching is False:
            raise ConfigError(
                "kv_events_config publishes what the prefix cache holds, found enable_prefix_caching=False: leave one "
                "of them out"
            )

    def _check_kv_offloading(self) -> None:
        for name in ("kv_offloading_size", "kv_offloading_disk_size"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < 2**20):
                raise ConfigError(f"{name}={value!r} must be a number of GiB above 0; leave it out to keep none")
        folder, size = self.kv_offloading_disk_path, self.kv_offloading_disk_size
        if folder is not None and (not isinstance(folder, str) or not folder):
            raise ConfigError(f"kv_offloading_disk_path={folder!r} must be a folder")
        if (folder is None) != (size is None):
            raise ConfigError(
                f"kv_offloading_disk_path={folder!r} and kv_offloading_disk_size={size!r} need each other: give the "
                "folder and how many GiB its files may take, or neither"
            )
        if folder is not None and self.kv_offloading_size is None:
            raise ConfigError(
                f"kv_offloading_disk_path={folder!r} needs kv_offloading_size: blocks go to disk and come back through "
                "host memory"
            )
        if folder is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"kv_offloading_disk_path={folder!r} can't be combined with "
                f"tensor_parallel_size={self.tensor_parallel_size}, of which each rank would have other files: use "
                "kv_offloading_size alone"
            )
        if self.kv_offloading_size is None:
            return
        setting = f"kv_offloading_size={self.kv_offloading_size}"
        if self.enable_prefix_caching is False:
            raise ConfigError(
                f"{setting} keeps what the prefix cache evicts, found enable_prefix_caching=False: leave one of them "
                "out"
            )

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
        selected = self.megatron_graph_config().graph_config()
        return dataclasses.replace(selected, shadow_check_share=self.graph_shadow_check_share)

    def megatron_graph_config(self) -> MegatronGraphConfig:
        """Return the graph settings in Megatron's vocabulary, with defaults resolved and combinations checked."""
        graphs = MegatronGraphConfig(
            cuda_graph_impl=self.cuda_graph_impl,
            inference_cuda_graph_scope=self.inference_cuda_graph_scope or None,  # type: ignore[arg-type]
            training=False,
        )
        if self.inference_cuda_graph_scope or graphs.inference_cuda_graph_scope != "layer":
            return graphs
        return dataclasses.replace(graphs, inference_cuda_graph_scope=_default_scope("local"))

    @classmethod
    def from_megatron(cls, source: object, **overrides: Any) -> Any:
        """Build from the graph settings of a Megatron configuration.

        `source` is a TransformerConfig, an arguments namespace or a mapping, of any version, deprecated fields
        included. `overrides` are fields of the configuration and take precedence; with `mode="training"` it is a
        TrainingConfig. Raises GraphConfigError for combinations that Megatron rejects too. Build the model itself with
        `cuda_graph_impl="none"`.
        """
        if overrides.get("mode") == "training":
            return TrainingConfig.from_megatron(source, **_of_training(overrides))
        graphs = MegatronGraphConfig.from_megatron(source, training=False)
        values = {
            "cuda_graph_impl": graphs.cuda_graph_impl,
            "inference_cuda_graph_scope": graphs.inference_cuda_graph_scope,
        }
        return cls(**(values | overrides))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """Build from a dict of field values. Raises ConfigError for an unknown key, naming the nearest known one."""
        known = {field.name for kind in (cls, TrainingConfig) for field in dataclasses.fields(kind)}
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown engine setting {key!r}{did_you_mean(key, known)}")
        return cls(**values)


def _default_scope(impl: str) -> str:
    return "block" if impl == "local" else "none"


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
