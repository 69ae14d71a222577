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
from engine.layers.activation import ACTIVATIONS, ALIASES, SWIGLU, GatedActivation
from engine.layers.expert_names import ExpertNames
from engine.layers.moe import SigmoidRouting
from engine.layers.rotary import RopeScaling
from engine.models.fields import MAX_CONTEXT, MAX_LAYERS, MAX_NUMBER, MAX_SIZE, Fields
from engine.models.rope_fields import ALIASES as ROPE_ALIASES
from engine.models.rope_fields import FULL, SLIDING, Rope, read_layer_rope, read_rope

__all__ = ["MAX_CONTEXT", "MAX_LAYERS", "MAX_NUMBER", "MAX_SIZE", "Family", "Fields", "LayerNorms", "ModelConfig"]

DTYPE_NAMES = ("bfloat16", "float16", "float32")
ALL_ACTIVATIONS = tuple(ACTIVATIONS)
FACTORS = ("embedding_scale", "residual_scale", "logit_scale")
"""Fields of ModelConfig in which None stands for 1."""
PATTERN = "sliding_window_pattern"


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The norms of a decoder layer: for each place, the name in a checkpoint, or None where the family has no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of a decoder's tensors in a checkpoint.

    - embedding, layers, norm, head: the names of the embedding, of the list of layers, of the norm before the head and
      of the head.
    - attention: the name of a layer's attention.
    - qkv, gate_up: the names of the parts of a projection, or one name if the checkpoint has their rows in one tensor.
      An MLP without a gate has one name in gate_up.
    - qkv_by_group: the one tensor of qkv has, for each KV head, the rows of its queries, of its key and of its value.
    - output, down: the names of the output projections of attention and of the MLP.
    - unused: ends of the names of buffers in old checkpoints, whose values the config determines.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qkv_by_group: bool = False
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    norm: str = "model.norm"
    head: str = "lm_head"
    unused: tuple[str, ...] = ("rotary_emb.inv_freq",)

    @property
    def root(self) -> str:
        """What the names of all tensors but the head's begin with; checkpoints without head leave it out."""
        return self.layers.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of an architecture that its config.json doesn't state, and how that file is read.

    - defaults: values of keys that are absent or null. A key without one must be present. Null is no token id, and as
      many KV heads as heads.
    - fixed: for keys that change what a model computes, the values that are supported, beside null and absence.
    - numbers: fields of ModelConfig and the keys of their values: factors and bounds. An absent key has its value in
      `defaults`, or None; null is None.
    - eps_key, activation_key: names of the keys of the norms' epsilon and of the MLP's activation.
    - activations: the supported activations. default_activation: that of an absent key.
    - names: the names of tensors.
    - norms: the norms of a layer. norm: their kind, see ModelConfig. norm_offset: the factor of a norm is 1 + weight.
    - qk_norm: whether q and k have norms. qk_norm_kind: which ones, see ModelConfig. qk_norm_key: the key that decides.
    - bias_key: the key of biases in attention. qkv_bias, output_bias: whether attention projections have biases; None:
      as the config says.
    - mlp_bias_key: the key of biases in the MLP; None: it has them if `mlp_bias`. head_bias: whether the head has one.
    - gated_mlp, parallel_block, rope_interleaved, embedding_scale_in_dtype: see ModelConfig.
    - partial_rotary: whether the config can rotate a part of each head. rope_aliases: names of kinds of scaling.
    - rope_by_layer: None, or the key of the rotary base of layers with a window, if they have another rotary embedding
      than layers with full attention; `rope_kinds_by_layer` are then the supported kinds of scaling.
    - window: which layers have the config's sliding_window: "never", "always" (all layers), "flagged" (with
      use_sliding_window, by `layer_types` or from max_window_layers on) or "listed" (by `layer_types`, or all but every
      n-th layer).
    - default_window: value of an absent sliding_window; None: no window. window_pattern: the n of "listed"; 0: no layer
      has full attention. window_pattern_key: the key that can change it.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("silu",)
    default_activation: str = "silu"
    names: TensorNames = TensorNames()
    norms: LayerNorms = LayerNorms()
    norm: str = "rms"
    norm_offset: bool = False
    qk_norm: bool = False
    qk_norm_kind: str = "head"
    qk_norm_key: str | None = None
    bias_key: str = "attention_bias"
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias_key: str | None = None
    mlp_bias: bool = False
    head_bias: bool = False
    gated_mlp: bool = True
    parallel_block: bool = False
    partial_rotary: bool = False
    rope_interleaved: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    rope_by_layer: str | None = None
    rope_kinds_by_layer: tuple[str, ...] = ("default", "linear")
    embedding_scale_in_dtype: bool = False
    window: str = "never"
    default_window: int | None = None
    window_pattern: int = 0
    window_pattern_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of a decoder; sizes in elements, lengths in tokens.

    - rms_norm_eps: the epsilon of all norms.
    - norm: "rms" (RMSNorm), "layer" (LayerNorm with a weight), "layer_bias" (with weight and bias) or "layer_plain"
      (with neither).
    - qk_norm: whether q and k have norms. qk_norm_kind: "head" (RMSNorm of each head, one weight for all), "all_heads"
      (RMSNorm of all heads as one vector) or "layer" (LayerNorm of each head, a weight per head).
    - attention_bias: whether q, k and v have biases; output_bias: whether attention's output projection has one.
    - head_bias: whether the head has a bias.
    - windows: the window of each layer, None for full attention; empty if no layer has one.
    - attention_scale: the factor of the attention scores; None: 1 / sqrt(head_dim). attention_softcap: scores are
      softcap * tanh(scores / softcap); None: unbounded.
    - qkv_clip: q, k and v are clamped to [-qkv_clip, qkv_clip], after the norms of q and k.
    - rope_theta, rope_scaling: the rotary embedding. local_rope_theta, local_rope_scaling: the one of layers with a
      window, if it differs. rotary_dim: how many elements of a head it rotates, None for all. rope_interleaved: it
      rotates neighbouring elements together, instead of i and i + rotary_dim / 2. nope_layers: layers without it.
    - scaled_positions: whether max_position_embeddings already counts the scaling of RoPE.
    - attention_sinks: whether each attention head has a sink, one more score in the softmax.
    - gated_mlp: whether the MLP computes down(act(gate(x)) * up(x)), or down(act(up(x))).
    - parallel_block: attention and MLP read the same hidden state; without a norm before the MLP, the same norm too.
    - embedding_scale: the factor of embeddings; embedding_scale_in_dtype: it is rounded to the model's dtype.
      residual_scale: the factor of what attention and MLP add to the hidden state. logit_scale: the factor of the
      logits. logit_softcap: logits are softcap * tanh(logits / softcap). None: unchanged.
    - num_experts: the number of experts of the layers in `sparse_layers`, of which each token uses experts_per_token;
      normalize_weights scales a token's weights to a sum of 1. `intermediate_size` is the width of a dense MLP,
      moe_intermediate_size the width of an expert.
    - sigmoid_routing: how a SigmoidRouter chooses; None: experts are chosen by softmax.
    - draft_layers: how many layers for drafts follow the model's own in the checkpoint; they are not loaded.
    - router_bias, expert_bias: whether the router, and each expert's matrices, have biases. expert_activation: the
      activation of the experts. shared_expert_size: the width of the MLP of all tokens beside the experts, 0 if there
      is none; shared_expert_gate: whether it has a gate. expert_names: the names of these tensors.
    - eos_token_ids: all end-of-text ids.
    - has_lm_head: whether the checkpoint has an LM head; without one, the model generates no text. num_labels: outputs
      of a classification head; 0: none.
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
    head_bias: bool = False
    activation: str = "silu"
    gated_mlp: bool = True
    names: TensorNames = TensorNames()
    norms: LayerNorms = LayerNorms()
    norm: str = "rms"
    norm_offset: bool = False
    qk_norm: bool = False
    qk_norm_kind: str = "head"
    parallel_block: bool = False
    rotary_dim: int | None = None
    rope_interleaved: bool = False
    nope_layers: frozenset[int] = frozenset()
    windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    qkv_clip: float | None = None
    attention_sinks: bool = False
    embedding_scale: float | None = None
    embedding_scale_in_dtype: bool = False
    residual_scale: float | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    normalize_weights: bool = False
    sparse_layers: frozenset[int] = frozenset()
    sigmoid_routing: SigmoidRouting | None = None
    draft_layers: int = 0
    router_bias: bool = False
    expert_bias: bool = False
    expert_activation: GatedActivation = SWIGLU
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    expert_names: ExpertNames = ExpertNames()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    has_lm_head: bool = True
    num_labels: int = 0
    dtype: str = "bfloat16"
    quantization: Quantization | None = None

    @property
    def context_length(self) -> int:
        """The longest context computed exactly: the model's positions, stretched by the scaling of its RoPE."""
        length = self.max_position_embeddings
        scaling = None if self.scaled_positions else self.rope_scaling
        if scaling is not None and scaling.kind == "yarn":
            length = max(length, int(scaling.original_max_position_embeddings * scaling.factor))
        elif scaling is not None and scaling.kind == "linear":
            length = int(length * scaling.factor)
        return min(length, MAX_CONTEXT)

    @property
    def mlp_activations(self) -> int:
        """Elements per token that the widest MLP holds at once, beside its input."""
        routed = self.experts_per_token * (self.moe_intermediate_size + self.hidden_size)
        dense = self.intermediate_size if self.has_dense_layers else self.shared_expert_size
        return max(3 * dense, routed if self.sparse_layers else 0)

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has an MLP in place of experts."""
        return len(self.sparse_layers) < self.num_layers

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what each decoder layer stores, in layer order."""
        shared: dict[str, Any] = {
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "scale": self.attention_scale,
            "softcap": self.attention_softcap,
            "sinks": self.attention_sinks,
        }
        full = FullAttentionSpec(**shared)
        if not self.windows:
            return (full,) * self.num_layers
        # full attention has faster kernels, and a window that no context exceeds is the same
        return tuple(
            full if size is None or size >= self.context_length else SlidingWindowSpec(**shared, size=size)
            for size in self.windows
        )

    def options(self) -> dict[str, Any]:
        """Return the fields whose values differ from a Llama's, and all fields of a subclass.

        Code that computes some options alone refuses all others by name, including options of later families.
        """
        plain = {item.name: item.default for item in dataclass_fields(ModelConfig)}
        return {
            item.name: getattr(self, item.name)
            for item in dataclass_fields(self)
            if item.name not in plain
            or (plain[item.name] is not MISSING and getattr(self, item.name) != plain[item.name])
        }

    def rope_index(self, index: int) -> int | None:
        """Return which rotary embedding layer `index` uses: 0, 1 for the one of layers with a window, None for none."""
        if index in self.nope_layers:
            return None
        return int(self.local_rope_theta is not None and bool(self.windows) and self.windows[index] is not None)

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-text id, or None."""
        return self.eos_token_ids[0] if self.eos_token_ids else None


def read_model_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build a ModelConfig from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    given = {key: value for key, value in values.items() if value is not None}
    fields = Fields({**values, **family.defaults, **given}, where)
    _reject_unsupported(fields, family)
    heads = fields.integer("num_attention_heads")
    kv_heads = heads  # of null; an absent key may have another default
    if "num_key_value_heads" not in values or values["num_key_value_heads"] is not None:
        kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", max(hidden // heads, 1), high=1024)
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd; rotary embedding needs an even one")
    max_positions = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    rope, local_rope = _read_ropes(fields, family, max_positions, head_dim)
    bias = fields.flag(family.bias_key)
    qk_norm = family.qk_norm if family.qk_norm_key is None else fields.flag(family.qk_norm_key)
    ids = Fields({**family.defaults, **values}, where)  # null is none
    bos = ids.token_ids("bos_token_id")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number(family.eps_key, 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        local_rope_theta=None if local_rope is None else local_rope.theta,
        local_rope_scaling=None if local_rope is None else local_rope.scaling,
        scaled_positions=local_rope is not None,
        rotary_dim=None if rope.dims == head_dim else rope.dims,
        rope_interleaved=family.rope_interleaved,
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias if family.mlp_bias_key is None else fields.flag(family.mlp_bias_key),
        head_bias=family.head_bias,
        activation=_activation(fields, family),
        gated_mlp=family.gated_mlp,
        names=family.names,
        norms=family.norms,
        norm=family.norm,
        norm_offset=family.norm_offset,
        qk_norm=qk_norm,
        qk_norm_kind=family.qk_norm_kind if qk_norm else "head",
        parallel_block=family.parallel_block,
        windows=_read_windows(Fields(values, where), family, layers),
        embedding_scale_in_dtype=family.embedding_scale_in_dtype,
        **_read_numbers(values, fields, family),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=ids.token_ids("eos_token_id"),
        dtype=_dtype(fields),
        quantization=read_quantization(values, where),
    )


def _reject_unsupported(fields: Fields, family: Family) -> None:
    values = fields.values
    for key, supported in family.fixed.items():
        if values.get(key) is not None and values[key] not in supported:
            raise fields.error(key, " or ".join(map(json.dumps, supported or (None,))))


def _activation(fields: Fields, family: Family) -> str:
    key = family.activation_key
    value = fields.values.get(key)
    value = family.default_activation if value is None else value
    name = ALIASES.get(value, value) if isinstance(value, str) else None
    if name not in family.activations:
        raise fields.error(key, " or ".join(map(repr, family.activations)))
    return name


def _read_numbers(values: Mapping[str, Any], fields: Fields, family: Family) -> dict[str, float | None]:
    """Return the fields of ModelConfig that `family.numbers` names."""
    found: dict[str, float | None] = {}
    for name, key in family.numbers.items():
        absent = values[key] is None if key in values else family.defaults.get(key) is None
        value = None if absent else fields.number(key)
        found[name] = None if name in FACTORS and value == 1.0 else value
    return found


def _read_ropes(fields: Fields, family: Family, max_positions: int, head_dim: int) -> tuple[Rope, Rope | None]:
    """Return the rotary embedding, and the one of layers with a window if the family has another one for them."""
    if family.rope_by_layer is None:
        aliases = ROPE_ALIASES | family.rope_aliases
        partial = family.partial_rotary
        return read_rope(fields.values, max_positions, head_dim, fields.where, partial=partial, aliases=aliases), None
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "1.0 (rotation of whole heads)")
    thetas = ((FULL, "rope_theta"), (SLIDING, family.rope_by_layer))
    full, local = (
        read_layer_rope(
            fields,
            kind,
            max_positions,
            head_dim,
            theta_key=key,
            default_theta=10000.0,
            kinds=family.rope_kinds_by_layer,
        )
        for kind, key in thetas
    )
    return full, local


def require_no_listed_windows(fields: Fields) -> None:
    """Raise ModelError if `layer_types` lists layers with a window, of a config that switches windows off."""
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list) and SLIDING in kinds and fields.values.get("sliding_window") is not None:
        raise fields.error("use_sliding_window", f"true, since 'layer_types' lists {SLIDING!r} layers")


def _read_windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window, None for full attention; nothing if no layer has one. See Family.window."""
    if family.window == "never":
        return ()
    if family.window == "flagged" and not fields.flag("use_sliding_window"):
        require_no_listed_windows(fields)
        return ()
    values = fields.values
    if values.get("sliding_window") is None and ("sliding_window" in values or family.default_window is None):
        return ()
    window = fields.integer("sliding_window", family.default_window)
    kinds = values.get("layer_types")
    if family.window == "always":
        if kinds not in (None, [SLIDING] * layers):
            raise fields.error("layer_types", f"null, or {layers} times {SLIDING!r}: all layers have the window")
        return (window,) * layers
    if kinds is None and family.window == "flagged":
        first = fields.integer("max_window_layers", 28, low=0)
        kinds = [SLIDING if index >= first else FULL for index in range(layers)]
    elif kinds is None:
        pattern = family.window_pattern or layers + 1
        if family.window_pattern_key is not None:
            pattern = fields.integer(family.window_pattern_key, pattern, high=MAX_LAYERS + 1)
        elif values.get(PATTERN) not in (None, pattern):
            raise fields.error(PATTERN, f"{pattern} or left out; list the layers in 'layer_types' instead")
        kinds = [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise fields.error("layer_types", f"a list of {layers} times {SLIDING!r} or {FULL!r}")
    return tuple(window if kind == SLIDING else None for kind in kinds) if SLIDING in kinds else ()


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(key)
    if value is None:
        return "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPE_NAMES:
        raise fields.error(key, f"one of {', '.join(DTYPE_NAMES)}")
    return name
