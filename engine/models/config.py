"""Model configuration, read from a Hugging Face config.json: shapes, RoPE, tied weights and token ids.

Reads both layouts of that file (rope_theta + rope_scaling, and transformers 5's rope_parameters) and rejects every
setting that the models here can't compute exactly. registry.py lists the architectures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any

from engine.attention.cache_spec import CacheSpec, FullAttentionSpec, SlidingWindowSpec
from engine.checkpoint.quantization import Quantization, read_quantization
from engine.errors import ModelError
from engine.layers.activation import ALIASES
from engine.layers.rotary import ROPE_KINDS, RopeScaling, yarn_attention_factor
from graph_cache.validation import is_whole_number

MAX_LAYERS = 1024
MAX_SIZE = 2**24
MAX_CONTEXT = 2**22
MAX_NUMBER = 1e30
DTYPE_NAMES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The norms of a decoder layer: for each place, the name in a checkpoint, or None where the family has no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of an architecture that its config.json doesn't state, and how that file is read.

    - defaults: values of keys that are absent or null. A key without one must be present.
    - eps_key, activation_key: names of the keys of the norms' epsilon and of the MLP's activation.
    - activations: the supported activations; the first one is that of an absent key.
    - fixed: for keys that change what a model computes, the values that are supported, beside null and absence.
    - norms: the norms of a layer. norm_offset: the factor of a norm is 1 + weight.
    - qk_norm: whether each head of q and k has a norm.
    - qkv_bias, output_bias: whether attention projections have biases; None: as `attention_bias` in the config.
    - mlp_bias_key: whether the config can enable biases in the MLP.
    - window: "always" (the config's sliding_window applies to all layers), "flagged" (only with use_sliding_window) or
      "never".
    - default_window: value of an absent sliding_window.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("silu",)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    norms: LayerNorms = LayerNorms()
    norm_offset: bool = False
    qk_norm: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias_key: bool = False
    window: str = "never"
    default_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of a decoder; sizes in elements, lengths in tokens.

    - attention_bias: whether q, k and v have biases; output_bias: whether attention's output projection has one.
    - sliding_window: the active window, or None. Contexts up to it are computed exactly, so it bounds `context_length`.
    - windows: the window of each layer, None for full attention; empty if no layer has one.
    - attention_scale: the factor of the attention scores; None: 1 / sqrt(head_dim).
    - rope_theta, rope_scaling: the rotary embedding. local_rope_theta, local_rope_scaling: the one of layers with a
      window, if it differs.
    - scaled_positions: whether max_position_embeddings already counts the scaling of RoPE.
    - embedding_scale: the factor of embeddings, rounded to the model's dtype; logit_softcap: logits are
      softcap * tanh(logits / softcap). None: unchanged.
    - num_experts: the number of experts of the layers in `sparse_layers`, of which each token uses experts_per_token;
      normalize_weights scales a token's weights to a sum of 1. `intermediate_size` is the width of a dense MLP,
      moe_intermediate_size the width of an expert.
    - eos_token_ids: all end-of-text ids.
    - dtype: the checkpoint's dtype, one of DTYPE_NAMES.
    - quantization: how the linear layers store their weights; None: in the model's dtype.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    local_rope_scaling: RopeScaling | None = None
    scaled_positions: bool = False
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    norms: LayerNorms = LayerNorms()
    norm_offset: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    normalize_weights: bool = False
    sparse_layers: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    quantization: Quantization | None = None

    @property
    def context_length(self) -> int:
        """The longest context computed exactly: the model's positions, bounded by its sliding window."""
        length = self.max_position_embeddings
        scaling = None if self.scaled_positions else self.rope_scaling
        if scaling is not None and scaling.kind == "yarn":
            length = max(length, int(scaling.original_max_position_embeddings * scaling.factor))
        elif scaling is not None and scaling.kind == "linear":
            length = int(length * scaling.factor)
        length = min(length, MAX_CONTEXT)
        return length if self.sliding_window is None else min(length, self.sliding_window)

    @property
    def mlp_activations(self) -> int:
        """Elements per token that the widest MLP holds at once, beside its input."""
        routed = self.experts_per_token * (self.moe_intermediate_size + self.hidden_size)
        return max(3 * self.intermediate_size, routed if self.sparse_layers else 0)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what each decoder layer stores, in layer order."""
        heads, dim, scale = self.num_kv_heads, self.head_dim, self.attention_scale
        full = FullAttentionSpec(kv_heads=heads, head_dim=dim, scale=scale)
        if not self.windows:
            return (full,) * self.num_layers
        return tuple(
            full if size is None else SlidingWindowSpec(kv_heads=heads, head_dim=dim, scale=scale, size=size)
            for size in self.windows
        )

    def options(self) -> dict[str, Any]:
        """Return the fields whose values differ from a Llama's, and all fields of a subclass.

        Code that computes some options alone refuses all others by name, those of later families included.
        """
        plain = {item.name: item.default for item in dataclass_fields(ModelConfig)}
        return {
            item.name: getattr(self, item.name)
            for item in dataclass_fields(self)
            if item.name not in plain
            or (plain[item.name] is not MISSING and getattr(self, item.name) != plain[item.name])
        }

    def uses_local_rope(self, index: int) -> bool:
        """Whether layer `index` uses the rotary embedding of layers with a window."""
        return self.local_rope_theta is not None and bool(self.windows) and self.windows[index] is not None

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-text id, or None."""
        return self.eos_token_ids[0] if self.eos_token_ids else None


class Fields:
    """Typed access to a JSON object. Errors name the file, the key, the value found and what is expected."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def error(self, key: str, needed: str) -> ModelError:
        """Return a ModelError for `key`, for the caller to raise."""
        found = f"{self.values[key]!r}" if key in self.values else "nothing"
        return ModelError(f"{self.where}: {key!r} must be {needed}, found {found}; correct it or use another model")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """Return a whole number in [low, high]; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not is_whole_number(value, low, high):
            raise self.error(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0 and up to MAX_NUMBER; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_NUMBER:
            raise self.error(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the token ids of a single id, a list of ids, or null."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(is_whole_number(item, 0) for item in ids):
            raise self.error(key, "a token id or a list of token ids")
        return tuple(ids)


def read_model_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build a ModelConfig from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    given = {key: value for key, value in values.items() if value is not None}
    fields = Fields({**values, **family.defaults, **given}, where)
    _reject_unsupported(fields, family)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", max(hidden // heads, 1), high=1024)
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd; rotary embedding needs an even one")
    max_positions = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
    theta, scaling = read_rope(values, max_positions, where)
    bias = fields.flag("attention_bias")
    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers", high=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number(family.eps_key, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias_key and fields.flag("mlp_bias"),
        activation=_activation(fields, family),
        norms=family.norms,
        norm_offset=family.norm_offset,
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(Fields(values, where), family),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=_dtype(fields),
        quantization=read_quantization(values, where),
    )


def _reject_unsupported(fields: Fields, family: Family) -> None:
    values = fields.values
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.error("partial_rotary_factor", "1.0 (rotation of whole heads)")
    for key, supported in family.fixed.items():
        if values.get(key) is not None and values[key] not in supported:
            raise fields.error(key, " or ".join(map(json.dumps, supported or (None,))))


def _activation(fields: Fields, family: Family) -> str:
    key = family.activation_key
    value = fields.values.get(key)
    name = family.activations[0] if value is None else ALIASES.get(value, value) if isinstance(value, str) else value
    if name not in family.activations:
        raise fields.error(key, " or ".join(map(repr, family.activations)))
    return name


def _sliding_window(fields: Fields, family: Family) -> int | None:
    """Return the window that is active on any layer, or None."""
    if family.window == "never" or (family.window == "flagged" and not fields.flag("use_sliding_window")):
        return None
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    window = fields.integer("sliding_window", family.default_window)
    layer_types = fields.values.get("layer_types")
    if isinstance(layer_types, list) and "sliding_attention" not in layer_types:
        return None
    if family.window == "flagged" and layer_types is None:
        # layers before max_window_layers use full attention
        if fields.integer("max_window_layers", 28, low=0) >= fields.integer("num_hidden_layers"):
            return None
    return window


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(key)
    if value is None:
        return "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPE_NAMES:
        raise fields.error(key, f"one of {', '.join(DTYPE_NAMES)}")
    return name


def read_rope(values: Mapping[str, Any], max_positions: int, where: str) -> tuple[float, RopeScaling | None]:
    """Return RoPE theta and scaling (None: unscaled), from `rope_parameters` or `rope_theta` and `rope_scaling`."""
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    settings = values.get(key) or {}
    if not isinstance(settings, Mapping):
        raise Fields(values, where).error(key, "an object")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ModelError(f"{where}: {key!r} differs by layer type ({', '.join(settings)}), which is not supported")
    fields = Fields(settings, f"{where}, {key}")
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.error("partial_rotary_factor", "1.0 (rotation of whole heads)")
    theta = fields.number("rope_theta", Fields(values, where).number("rope_theta", 10000.0))
    if theta <= 1.0:
        raise ModelError(f"{where}: rope_theta {theta} must be above 1: each dimension needs its own frequency")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"{where}: rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return theta, None
    original_length = Fields(values, where).integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_positions)
    )
    return theta, _scaling(kind, fields, original_length, max_positions)


def _scaling(kind: str, fields: Fields, original_length: int, max_positions: int) -> RopeScaling:
    """Return the scaling of one kind; `original_length` is the context length before scaling."""
    if kind == "linear":
        # Only GGUF files have a factor on cos and sin here.
        attention = fields.number("gguf_attn_factor", 1.0)
        return RopeScaling(kind=kind, factor=fields.number("factor"), attention_factor=attention)
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise fields.error("high_freq_factor", f"above low_freq_factor ({low})")
        return RopeScaling(
            kind=kind,
            factor=fields.number("factor"),
            original_max_position_embeddings=original_length,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = fields.number("factor", max_positions / original_length)
    mscale = fields.number("mscale") if fields.values.get("mscale") else None
    mscale_all = fields.number("mscale_all_dim") if fields.values.get("mscale_all_dim") else None
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original_length,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
        attention_factor=fields.number("attention_factor", yarn_attention_factor(factor, mscale, mscale_all)),
    )
