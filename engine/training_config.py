"""Configuration of the engine of a training job: what `EngineConfig(mode="training", …)` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from graph_cache.adapters.megatron.config import MegatronGraphConfig
from graph_cache.adapters.megatron.vision import DEFAULT_MAX_IMAGES, VisionSettings, vision_settings
from graph_cache.adapters.megatron.vision import NAMES as VISION_NAMES
from graph_cache.config import DEFAULT_SHARE, GraphConfig
from graph_cache.utils.validation import NamesFields, is_whole_number

_POSITIVE_INTEGERS = ("num_threads", "cuda_graph_max_packed_seqs")
_BOOLEANS = ("cuda_graph_packed_seq", "cuda_graph_moe_dropless")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(NamesFields):
    """Settings of the engine of a training job (docs/training.md). `EngineConfig(mode="training", …)` returns one.

    - `num_threads`: threads of a step on a CPU. Default: tuned while training, unless OMP_NUM_THREADS or
      MKL_NUM_THREADS is set.
    - Graph settings use Megatron's names and values. `inference_cuda_graph_scope` has no effect on training.
    - `cuda_graph_max_packed_seqs`: `attach` pads packed sequences of a Megatron-Core model to this many documents
      (`encore tune --packed` chooses it). `cuda_graph_packed_seq`: False turns that off; True needs a number.
    - `cuda_graph_moe_dropless`: dropless experts of a Megatron-Core model on one device use torch's grouped GEMM, with
      token counts on the device, until detach, so that MoE layers can be captured whole.
    - `vision_*`: graphs of a vision encoder, which `attach` captures beside the language model's. `scope`: `attn`,
      `mlp`, or empty for whole layers. The maximum length is in patches per microbatch; `vision_token_budgets` gives
      several, ascending (`graph_cache.tune_token_budgets` chooses them). `vision_max_images`: images, or frames, per
      microbatch. Larger microbatches run eager.
    - `graph_shadow_check_share`: 0: replays are never compared with eager steps.

    Raises ConfigError for an invalid value.
    """

    mode: str = "training"
    num_threads: int | None = None
    cuda_graph_impl: str = "local"
    inference_cuda_graph_scope: str | None = None
    cuda_graph_modules: tuple[str, ...] = ()
    cuda_graph_warmup_steps: int = 3
    cuda_graph_packed_seq: bool | None = None
    cuda_graph_max_packed_seqs: int | None = None
    cuda_graph_moe_dropless: bool = False
    vision_cuda_graph_impl: str = "none"
    vision_cuda_graph_scope: tuple[str, ...] = ()
    max_vision_cuda_graph_seq_length: int | None = None
    vision_token_budgets: tuple[int, ...] | None = None
    vision_max_images: int = DEFAULT_MAX_IMAGES
    graph_shadow_check_share: float = DEFAULT_SHARE

    def __post_init__(self) -> None:
        for name in _POSITIVE_INTEGERS:
            value = getattr(self, name)
            if value is not None and not is_whole_number(value, 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        for name in _BOOLEANS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be True or False")
        check_share(self.graph_shadow_check_share)
        graphs = self.megatron_graph_config()
        for name in ("cuda_graph_impl", "cuda_graph_modules"):  # deprecated values are replaced
            object.__setattr__(self, name, getattr(graphs, name))
        if graphs.inference_cuda_graph_scope != "none":
            object.__setattr__(self, "inference_cuda_graph_scope", graphs.inference_cuda_graph_scope)
        self._check_packed()
        self._check_dropless()
        self._check_vision()

    @property
    def packed_documents(self) -> int | None:
        """The number of documents to pad packed sequences to; None: no padding."""
        return None if self.cuda_graph_packed_seq is False else self.cuda_graph_max_packed_seqs

    def graph_config(self) -> GraphConfig:
        """Return the graph settings of the core. Raises GraphConfigError for a combination that is not supported."""
        selected = self.megatron_graph_config().graph_config()
        return dataclasses.replace(selected, shadow_check_share=self.graph_shadow_check_share)

    def megatron_graph_config(self) -> MegatronGraphConfig:
        """Return the graph settings in Megatron's vocabulary, with defaults resolved and combinations checked."""
        graphs = MegatronGraphConfig(
            cuda_graph_impl=self.cuda_graph_impl,
            inference_cuda_graph_scope=self.inference_cuda_graph_scope or None,  # type: ignore[arg-type]
            cuda_graph_modules=self.cuda_graph_modules,
            cuda_graph_warmup_steps=self.cuda_graph_warmup_steps,
            training=True,
            moe_dropless=self.cuda_graph_moe_dropless,
            model_facts_known=False,  # `attach` checks them against the model
        )
        # A deprecated value among the modules may have selected another scope than Megatron's default.
        if self.inference_cuda_graph_scope or graphs.inference_cuda_graph_scope != "layer":
            return graphs
        return dataclasses.replace(graphs, inference_cuda_graph_scope="none")

    def vision_settings(self) -> VisionSettings:
        """Return the settings of a vision encoder's graphs, resolved. Raises GraphConfigError."""
        return vision_settings(
            self.vision_cuda_graph_impl,
            self.vision_cuda_graph_scope,
            self.max_vision_cuda_graph_seq_length,
            self.vision_token_budgets,
            self.vision_max_images,
            warmup_steps=self.cuda_graph_warmup_steps,
        )

    def _check_packed(self) -> None:
        if self.cuda_graph_packed_seq and self.cuda_graph_max_packed_seqs is None:
            raise ConfigError(
                "cuda_graph_packed_seq=True needs cuda_graph_max_packed_seqs, the number of documents to pad to: "
                "`encore tune --packed FILE` chooses one for your data"
            )
        if self.packed_documents is not None and self.cuda_graph_impl == "full_iteration":
            raise ConfigError(
                f"cuda_graph_max_packed_seqs={self.cuda_graph_max_packed_seqs} pads what attach() captures; "
                "cuda_graph_impl='full_iteration' captures whole batches: pad them in the data loader and leave it out"
            )

    def _check_dropless(self) -> None:
        if not self.cuda_graph_moe_dropless:
            return
        modules, impls = self.cuda_graph_modules, ("local", "full_iteration")
        if self.cuda_graph_impl not in impls or (modules and "moe" not in modules):
            raise ConfigError(
                "cuda_graph_moe_dropless=True captures whole MoE layers: set cuda_graph_impl='local' with "
                "cuda_graph_modules=['moe', …] or none (whole layers), or cuda_graph_impl='full_iteration'; found "
                f"cuda_graph_impl={self.cuda_graph_impl!r}, cuda_graph_modules={list(modules)}"
            )

    def _check_vision(self) -> None:
        settings = self.vision_settings()
        impl = settings.graphs.cuda_graph_impl
        for name, value in (
            ("vision_cuda_graph_impl", impl),
            ("vision_cuda_graph_scope", settings.graphs.cuda_graph_modules),
            ("vision_token_budgets", settings.budgets),
        ):
            object.__setattr__(self, name, value)
        if impl != "none" and self.cuda_graph_impl == "full_iteration":
            raise ConfigError(
                f"vision_cuda_graph_impl={impl!r} captures the encoder's layers, but cuda_graph_impl='full_iteration' "
                "captures the whole iteration, the encoder included: leave one of them out"
            )

    @classmethod
    def from_megatron(cls, source: object, **overrides: Any) -> TrainingConfig:
        """Build from the graph settings of a Megatron configuration. See `EngineConfig.from_megatron`."""
        # `attach` and `capture_forward_backward` check the RNG state tracker themselves.
        graphs = MegatronGraphConfig.from_megatron(
            source, training=True, inference_cuda_graph_scope="none", use_cudagraphable_rng=True
        )
        values: dict[str, Any] = {
            "cuda_graph_impl": graphs.cuda_graph_impl,
            "inference_cuda_graph_scope": graphs.inference_cuda_graph_scope,
            "cuda_graph_modules": graphs.cuda_graph_modules,
            "cuda_graph_warmup_steps": graphs.cuda_graph_warmup_steps,
        }
        if graphs.cuda_graph_impl != "full_iteration":
            values |= _packed_settings(source)
        values |= {name: value for name in VISION_NAMES if (value := _setting(source, name)) is not None}
        return cls(**(values | overrides))


TRAINING_ONLY = (
    "cuda_graph_modules",
    "cuda_graph_warmup_steps",
    "cuda_graph_packed_seq",
    "cuda_graph_max_packed_seqs",
    "cuda_graph_moe_dropless",
    *VISION_NAMES,
)


def check_share(share: float) -> None:
    """Raise ConfigError if the share of shadow checks is no share."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
        raise ConfigError(f"graph_shadow_check_share={share!r} must be a number from 0 to 1")


def _packed_settings(source: object) -> dict[str, Any]:
    """Return the settings of packed sequences in a Megatron configuration, off unless its switch is on."""
    found = {}
    for name in ("cuda_graph_packed_seq", "cuda_graph_max_packed_seqs"):
        found[name] = _setting(source, name)
    return found if found["cuda_graph_packed_seq"] is not None else {}


def _setting(source: object, name: str) -> Any:
    """Return a setting of a Megatron configuration; None if it is absent."""
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
