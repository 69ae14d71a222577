"""Graph settings by Megatron-Core's names and values, including the deprecated ones, mapped onto GraphConfig.

This module normalises inputs; `refusals.py` rejects unsupported combinations. Facts about a model that affect captures
are passed in as plain values. Pure Python: neither torch nor megatron is imported.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, fields
from types import FrameType
from typing import Any

from graph_cache.adapters.megatron.refusals import refuse_contradictions
from graph_cache.config import INFERENCE_SCOPES, GraphConfig
from graph_cache.errors import GraphConfigError
from graph_cache.utils.validation import NamesFields, did_you_mean, is_whole_number

# Megatron's implementations, and the `training_captures` of GraphConfig that each selects.
TRAINING_CAPTURES_OF = {
    "none": "none",
    "local": "native",
    "transformer_engine": "transformer_engine",
    "full_iteration": "iteration",
}
IMPLS = tuple(TRAINING_CAPTURES_OF)
MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
RECOMPUTE_GRANULARITIES = ("selective", "full")

_CALLING_PACKAGES = ("graph_cache.", "engine.")  # whose users see a deprecation warning as their own

# Values of cuda_graph_scope and cuda_graph_modules that became an impl or an inference scope instead of a module.
_RELOCATED_SCOPES = {
    "full_iteration": "cuda_graph_impl='full_iteration'",
    "full_iteration_inference": "cuda_graph_impl='local' with inference_cuda_graph_scope='block'",
}
_DEPRECATED = ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope")
_MEGATRON_ALIASES = {"te_rng_tracker": "use_te_rng_tracker", "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad"}


@dataclass(frozen=True, kw_only=True)
class MegatronGraphConfig(NamesFields):
    """Select which graphs are captured, in Megatron's vocabulary. `graph_config()` returns the core's settings.

    Frozen; every field holds its resolved value after construction.

    Selection (strings, or enum members of the same name):
      cuda_graph_impl             which implementation captures: `none`, `local` (this package), `transformer_engine`,
                                  `full_iteration`
      inference_cuda_graph_scope  `none`, `layer` (a graph per layer) or `block` (one per decode step);
                                  unset: `layer` under `local`, else `none`. `local` with `none` captures training only.
      cuda_graph_modules          parts of a layer that a training capture covers, as a list or a comma string;
                                  empty, or `full` alone: the whole layer
      cuda_graph_warmup_steps     eager training steps before the captures; inference warms up on its own

    Facts about the model and its training loop, by Megatron's names, which determine what is rejected:
      training                    False: only inference is captured, so dropout, recompute and NaN checks have no effect
      num_moe_experts, moe_layer_freq, is_hybrid_model, moe_pad_expert_input_to_capacity (drop-and-pad), moe_dropless
      recompute_granularity       None, `selective` or `full`
      cpu_offloading, check_for_nan_in_loss_and_grad
      hidden_dropout, attention_dropout   probabilities; use_te_rng_tracker or use_cudagraphable_rng state that every
                                  generator they use can be registered with a graph
      expandable_segments, nccl_graph_register   settings of the process; unset: read from PYTORCH_CUDA_ALLOC_CONF (or
                                  PYTORCH_ALLOC_CONF) and NCCL_GRAPH_REGISTER at construction

    Deprecated, each with one DeprecationWarning that names its replacement: enable_cuda_graph, external_cuda_graph,
    cuda_graph_scope, and the values `full_iteration` and `full_iteration_inference` of cuda_graph_modules. The last one
    has no effect, as its warning says, without an impl.

    Raises GraphConfigError for an invalid value, an unsupported combination, and a deprecated input that contradicts a
    new one.
    """

    cuda_graph_impl: str = None  # type: ignore[assignment]  # None until resolved, to tell unset from "none"
    inference_cuda_graph_scope: str = None  # type: ignore[assignment]
    cuda_graph_modules: tuple[str, ...] = None  # type: ignore[assignment]
    cuda_graph_warmup_steps: int = 3
    training: bool = True
    num_moe_experts: int | None = None
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_pad_expert_input_to_capacity: bool = False
    is_hybrid_model: bool = False  # its pattern says which layers are MoE layers, not moe_layer_freq
    recompute_granularity: str | None = None
    cpu_offloading: bool = False
    check_for_nan_in_loss_and_grad: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    use_te_rng_tracker: bool = False
    use_cudagraphable_rng: bool = False
    expandable_segments: bool = None  # type: ignore[assignment]
    nccl_graph_register: bool = None  # type: ignore[assignment]
    moe_dropless: bool = False  # experts without a fixed capacity compute without counts on the host
    model_facts_known: bool = True  # False: rules about experts are checked once the model is known
    enable_cuda_graph: InitVar[bool | None] = None
    external_cuda_graph: InitVar[bool | None] = None
    cuda_graph_scope: InitVar[Any] = None

    def __post_init__(self, enable_cuda_graph, external_cuda_graph, cuda_graph_scope) -> None:
        selection = _Selection(self.cuda_graph_impl, self.inference_cuda_graph_scope, self.cuda_graph_modules)
        selection.apply_deprecated(enable_cuda_graph, external_cuda_graph, cuda_graph_scope)
        impl = selection.impl or "none"
        self._set(
            cuda_graph_impl=impl,
            inference_cuda_graph_scope=selection.scope or ("layer" if impl == "local" else "none"),
            cuda_graph_modules=selection.modules or (),
        )
        self._check_facts()
        refuse_contradictions(self)

    @classmethod
    def from_inputs(cls, **values: Any) -> MegatronGraphConfig:
        """Build a config from inputs by name, such as a parsed file or command line; None means unset.

        Unlike the constructor, raises GraphConfigError for an unknown name, with the nearest known one.
        """
        for name in values:
            if name not in _input_names():
                raise GraphConfigError(f"unknown setting {name!r}{_suggest(name, _input_names())}")
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def from_megatron(cls, source: Mapping[str, Any] | object, **overrides: Any) -> MegatronGraphConfig:
        """Build a config from a Megatron configuration: a TransformerConfig, an arguments namespace, or a mapping.

        Reads the known settings and ignores all others; `overrides` take precedence. Megatron's defaults are not
        treated as inputs: a False `enable_cuda_graph` or an empty `cuda_graph_scope` neither warns nor contradicts.
        """
        given = source if isinstance(source, Mapping) else _attributes(source)
        values = {name: given[name] for name in _input_names() if given.get(name) is not None}
        for alias, name in _MEGATRON_ALIASES.items():
            if given.get(alias):
                values.setdefault(name, given[alias])
                values[name] = values[name] or given[alias]
        for name in ("cuda_graph_impl", "cuda_graph_modules", *_DEPRECATED):
            if name in values and _is_megatron_default(name, values[name]):
                del values[name]
        for name in ("cuda_graph_scope", "cuda_graph_modules"):
            if "inference_cuda_graph_scope" in overrides and name in values:
                words = _parse_words(name, values.pop(name))
                rest = [word for word in words if word != "full_iteration_inference"]
                if rest != list(words):
                    replacement = "inference_cuda_graph_scope, which is given, decides"
                    _warn(f"{name}=full_iteration_inference is deprecated and has no effect: {replacement}")
                if rest:
                    values[name] = rest
        return cls.from_inputs(**(values | overrides))

    def graph_config(self) -> GraphConfig:
        """Return the core's settings that these select."""
        return GraphConfig(
            inference_scope=self.inference_cuda_graph_scope,
            training_captures=TRAINING_CAPTURES_OF[self.cuda_graph_impl],
            modules=self.cuda_graph_modules,
            warmup_steps=self.cuda_graph_warmup_steps,
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_facts(self) -> None:
        _whole_number("cuda_graph_warmup_steps", self.cuda_graph_warmup_steps)
        if self.num_moe_experts is not None:
            _whole_number("num_moe_experts", self.num_moe_experts)
        freq = self.moe_layer_freq
        if isinstance(freq, (list, tuple)) and freq and all(layer in (0, 1) for layer in freq):
            self._set(moe_layer_freq=tuple(int(layer) for layer in freq))
        elif not is_whole_number(freq, 1):
            raise GraphConfigError(
                f"moe_layer_freq is {freq!r}: give N for one MoE layer in every N, or a list of 0 and 1 per layer"
            )
        granularity = self.recompute_granularity
        if granularity is not None:
            self._set(recompute_granularity=_parse_word("recompute_granularity", granularity, RECOMPUTE_GRANULARITIES))
        for name in ("hidden_dropout", "attention_dropout"):
            rate = getattr(self, name)
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
                raise GraphConfigError(f"{name} is {rate!r}: give a probability from 0 to 1")
        self._read_process_settings()
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise GraphConfigError(f"{name} is {getattr(self, name)!r}: give True or False")

    def _read_process_settings(self) -> None:
        if self.expandable_segments is None:
            text = ",".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
            self._set(expandable_segments="expandable_segments:true" in text.lower().replace(" ", ""))
        register = self.nccl_graph_register
        if register is None:
            # NCCL registers buffers of captured collectives unless this is 0.
            register = os.environ.get("NCCL_GRAPH_REGISTER", "1").strip() != "0"
        elif str(register) in ("0", "1"):
            register = str(register) == "1"
        self._set(nccl_graph_register=register)


_BOOLEANS = (
    "training",
    "moe_pad_expert_input_to_capacity",
    "moe_dropless",
    "is_hybrid_model",
    "cpu_offloading",
    "check_for_nan_in_loss_and_grad",
    "use_te_rng_tracker",
    "use_cudagraphable_rng",
    "expandable_segments",
    "nccl_graph_register",
)


class _Selection:
    """The three selection settings while deprecated inputs are merged into them; None means unset."""

    def __init__(self, impl: Any, scope: Any, modules: Any):
        self.impl = None if impl is None else _parse_word("cuda_graph_impl", impl, IMPLS)
        self.scope = None if scope is None else _parse_word("inference_cuda_graph_scope", scope, INFERENCE_SCOPES)
        found, self._relocated = ((), []) if modules is None else _split("cuda_graph_modules", modules)
        # A relocated value alone selects no modules, so it does not contradict a cuda_graph_scope that does.
        self.modules = None if modules is None or (self._relocated and not found) else found

    def apply_deprecated(self, enable: Any, external: Any, scope: Any) -> None:
        for name, flag, impl in (
            ("enable_cuda_graph", enable, "local"),
            ("external_cuda_graph", external, "transformer_engine"),
        ):
            if flag is None:
                continue
            if not isinstance(flag, bool):
                raise GraphConfigError(f"{name} is {flag!r}: give True or False, or use cuda_graph_impl={impl!r}")
            _warn(f"{name} is deprecated: use cuda_graph_impl={impl!r}" + ("" if flag else ", or leave it out"))
            if flag and not (impl == "local" and self.impl == "full_iteration"):  # Megatron leaves both set
                self._assign("impl", impl, name)
            elif self.impl == impl:
                raise GraphConfigError(f"{name}=False contradicts cuda_graph_impl={impl!r}: leave out {name}")
        if self._relocated:
            source_text = f"cuda_graph_modules={','.join(self._relocated)}"
            self._relocate(self._relocated, source_text, [])
        if scope is not None:
            self._apply_scope(scope)

    def _apply_scope(self, scope: Any) -> None:
        modules, relocated = _split("cuda_graph_scope", scope)
        selects_modules = bool(modules) or not relocated
        source_text = f"cuda_graph_scope={','.join(_parse_words('cuda_graph_scope', scope)) or '[]'}"
        self._relocate(relocated, source_text, [f"cuda_graph_modules={list(modules)}"] if selects_modules else [])
        if selects_modules:
            self._assign("modules", modules, source_text)

    def _relocate(self, words: list[str], source_text: str, other_replacements: list[str]) -> None:
        """Apply the deprecated values `words`, and warn with their replacements and `other_replacements`."""
        replacements = [_RELOCATED_SCOPES[word] for word in words] + other_replacements
        if len(words) == 2:
            raise GraphConfigError(
                f"{source_text} selects two implementations: choose {replacements[0]} or {replacements[1]}"
            )
        # Without an impl there are no graphs, and Megatron does not turn them on for this value.
        without_effect = "full_iteration_inference" in words and self.impl in (None, "none")
        effect = "full_iteration_inference has no effect without cuda_graph_impl='local': " if without_effect else ""
        _warn(f"{source_text} is deprecated: {effect}use {' and '.join(replacements)}")
        if "full_iteration" in words:
            # Older versions spell this as the scope `full_iteration` under `local`; `none` is Megatron's default.
            self.impl = None if self.impl in ("none", "local") else self.impl
            self._assign("impl", "full_iteration", source_text)
        if "full_iteration_inference" in words and not without_effect:
            self._assign("impl", "local", source_text)
            self._assign("scope", "block", source_text)

    def _assign(self, attribute: str, value: Any, source_text: str) -> None:
        setting = {"impl": "cuda_graph_impl", "scope": "inference_cuda_graph_scope", "modules": "cuda_graph_modules"}
        found = getattr(self, attribute)
        if found is not None and found != value and not (attribute == "modules" and set(found) == set(value)):
            raise GraphConfigError(
                f"the deprecated {source_text} means {setting[attribute]}={value!r}, "
                f"but {setting[attribute]} is {found!r}: leave out {source_text}"
            )
        setattr(self, attribute, value)


def _split(name: str, value: Any) -> tuple[tuple[str, ...], list[str]]:
    """Parse module names from a list, a tuple or a comma-separated string: distinct, ordered; `full` alone gives ().

    Returns the names that became an impl or an inference scope separately.
    """
    words = _parse_words(name, value)
    if "full" in words:
        others = [word for word in words if word != "full"]
        if others:
            raise GraphConfigError(
                f"{name} has 'full', the whole layer, together with {others}: give 'full' alone or only the parts"
            )
        return (), []
    for word in words:
        if word not in MODULES and word not in _RELOCATED_SCOPES:
            raise GraphConfigError(f"{name} has an unknown module {word!r}{_suggest(word, MODULES)}")
    modules = tuple(word for word in words if word in MODULES)
    return modules, [word for word in words if word not in modules]


def _parse_words(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        parts: Iterable[Any] = [part for part in value.strip("[]() ").split(",") if part.strip()]
    elif isinstance(value, Iterable) and not isinstance(value, Mapping):
        parts = value
    else:
        parts = [value]
    known = (*MODULES, "full", *_RELOCATED_SCOPES)
    return tuple(dict.fromkeys(_normalize(name, part, known) for part in parts))


def _parse_word(name: str, value: Any, known: tuple[str, ...]) -> str:
    word = _normalize(name, value, known)
    if word not in known:
        raise GraphConfigError(f"{name} is {word!r}{_suggest(word, known)}")
    return word


def _normalize(name: str, value: Any, known: tuple[str, ...]) -> str:
    """Return `value` as a string; for an enum member, whichever of its name and value is known."""
    spellings = (value, getattr(value, "name", None), getattr(value, "value", None))
    words = [text.strip().strip("'\"").lower() for text in spellings if isinstance(text, str)]
    if not words:
        raise GraphConfigError(f"{name} has {value!r}, of type {type(value).__name__}: give one of {', '.join(known)}")
    return next((word for word in words if word in known), words[0])


def _suggest(word: str, known: Iterable[str]) -> str:
    known = sorted(known)
    return f": known are {', '.join(known)}{did_you_mean(word, known)}"


def _whole_number(name: str, value: Any) -> None:
    if not is_whole_number(value, 0):
        raise GraphConfigError(f"{name} is {value!r}: give a whole number, 0 or more")


def _input_names() -> tuple[str, ...]:
    return (*(field.name for field in fields(MegatronGraphConfig)), *_DEPRECATED)


def _attributes(source: object) -> dict[str, Any]:
    names = (*_input_names(), *_MEGATRON_ALIASES)
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


def _is_megatron_default(name: str, value: Any) -> bool:
    if name == "cuda_graph_impl":
        return _parse_word(name, value, IMPLS) == "none"
    if name in ("cuda_graph_modules", "cuda_graph_scope"):
        return _parse_words(name, value) in ((), ("full",))
    return value is False


def _warn(message: str) -> None:
    # Attribute the warning to the caller of the constructor, so that Python's default filters show it.
    warnings.warn(message, DeprecationWarning, stacklevel=_depth_outside())


def _depth_outside() -> int:
    """Return the stack level, seen from `_warn`, of the first caller outside these packages."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_CALLING_PACKAGES):
        frame, depth = frame.f_back, depth + 1
    return depth
