"""Gemma 3, text only: sliding and full attention layers, each kind with its own rotary embedding.

Shapes: T tokens, h hidden size, H query heads, KV key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.cache_spec import CacheSpec, FullAttentionSpec, SlidingWindowSpec
from engine.attention.interface import Attention
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import RopeScaling, RotaryTable
from engine.layers.weight_slot import Slot
from engine.models.config import MAX_CONTEXT, MAX_LAYERS, Family, Fields, ModelConfig, read_model_config, read_rope
from engine.models.dense import DenseModel, GatedMLP, SelfAttention
from engine.models.dense_tensors import DenseTensors
from engine.models.interface import ForwardContext, Model

GEMMA3 = Family(architecture="Gemma3ForCausalLM", model_type="gemma3_text", qk_norm=True)
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_KINDS = ("default", "linear")
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""Values of keys that a config.json may leave out."""


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """ModelConfig with two kinds of layers. `rope_theta` and `rope_scaling` are those of full attention layers.

    - windows: the sliding window of each layer in tokens; None: full attention.
    - local_rope_theta, local_rope_scaling: rotary embedding of sliding layers.
    - attention_scale: the factor of the attention scores.
    - logit_softcap: logits are softcap * tanh(logits / softcap); None: unchanged.
    """

    windows: tuple[int | None, ...]
    local_rope_theta: float
    local_rope_scaling: RopeScaling | None
    attention_scale: float
    logit_softcap: float | None

    @property
    def context_length(self) -> int:
        """The model's positions, which already count the scaling of RoPE."""
        return min(self.max_position_embeddings, MAX_CONTEXT)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        heads, dim, scale = self.num_kv_heads, self.head_dim, self.attention_scale
        return tuple(
            FullAttentionSpec(kv_heads=heads, head_dim=dim, scale=scale)
            if window is None
            else SlidingWindowSpec(kv_heads=heads, head_dim=dim, scale=scale, size=window)
            for window in self.windows
        )


def read_gemma3_config(values: Mapping[str, Any], family: Family, where: str) -> Gemma3Config:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    fields = Fields(values, where)
    if values.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise fields.error("hidden_activation", "'gelu_pytorch_tanh'")
    if values.get("attn_logit_softcapping") is not None:
        raise fields.error("attn_logit_softcapping", "null (softcapping of attention scores is not supported)")
    if fields.flag("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "false (a decoder attends to earlier tokens only)")
    given = {key: value for key, value in values.items() if value is not None}
    rope_keys = ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters", "hidden_act")
    theta, scaling = _read_rope(fields, FULL)
    local_theta, local_scaling = _read_rope(fields, SLIDING)
    base = read_model_config({k: v for k, v in (DEFAULTS | given).items() if k not in rope_keys}, family, where)
    softcap = values.get("final_logit_softcapping")
    return Gemma3Config(
        **(vars(base) | {"rope_theta": theta, "rope_scaling": scaling}),
        windows=_read_windows(fields, base.num_layers),
        local_rope_theta=local_theta,
        local_rope_scaling=local_scaling,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=None if softcap is None else fields.number("final_logit_softcapping"),
    )


def _read_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window, from `layer_types` or from `sliding_window_pattern`: every n-th layer is full."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        pattern = fields.integer("sliding_window_pattern", 6, high=MAX_LAYERS)
        kinds = [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise fields.error("layer_types", f"a list of {layers} times {SLIDING!r} or {FULL!r}")
    window = fields.integer("sliding_window", 4096)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _read_rope(fields: Fields, kind: str) -> tuple[float, RopeScaling | None]:
    """Return RoPE theta and scaling of a kind of layer.

    Reads transformers 5's `rope_parameters`, an object per kind, or `rope_theta` and `rope_scaling` of full attention
    layers and `rope_local_base_freq` of sliding layers.
    """
    values = fields.values
    settings = values.get("rope_parameters") or {}
    if not isinstance(settings, Mapping) or any(not isinstance(value, Mapping | None) for value in settings.values()):
        raise fields.error("rope_parameters", f"an object with the objects {FULL!r} and {SLIDING!r}")
    key, default = ("rope_theta", 1e6) if kind == FULL else ("rope_local_base_freq", 1e4)
    own = dict(settings.get(kind) or {})
    scaling = values.get("rope_scaling")
    if kind == FULL and scaling is not None:
        if not isinstance(scaling, Mapping):
            raise fields.error("rope_scaling", "an object")
        own |= scaling
    rope_type = own.get("rope_type", own.get("type", "default"))
    if rope_type not in ROPE_KINDS:
        raise ModelError(
            f"{fields.where}: rope scaling {rope_type!r} of {kind} layers is not supported; supported are "
            f"{', '.join(ROPE_KINDS)}"
        )
    positions = fields.integer("max_position_embeddings", DEFAULTS["max_position_embeddings"], high=MAX_CONTEXT)
    one_kind = {"rope_theta": fields.number(key, default), "rope_parameters": own}
    return read_rope(one_kind, positions, f"{fields.where}, {kind}")


class Gemma3Norm(RMSNorm):
    """RMSNorm with the factor 1 + weight, in float32 until the result is rounded to x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.normalise(x.float()) * (1.0 + self.weight.float())).type_as(x)


class Gemma3HeadNorm(HeadNorm):
    """HeadNorm with the factor 1 + weight, in float32 until the result is rounded to x's dtype."""

    def forward(self, qk: Tensor) -> Tensor:
        rows = (self.q_weight.expand(self.heads, -1), self.k_weight.expand(self.kv_heads, -1))
        return (self.normalise(qk.float()) * (1.0 + torch.cat(rows).float())).type_as(qk)


class Gemma3MLP(GatedMLP):
    """down(gelu(gate(x)) * up(x)) with the tanh approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class Gemma3Layer(nn.Module):
    """Attention and MLP, each between two norms and with a residual connection: hidden [T, h] -> hidden [T, h]."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = Gemma3Norm(hidden, eps, dtype, device)
        self.attn = SelfAttention(config, index, dtype, device, parallel)
        self.attn.qk_norm = Gemma3HeadNorm(self.attn.heads, self.attn.kv_heads, self.attn.head_dim, eps, dtype, device)
        self.post_attention_norm = Gemma3Norm(hidden, eps, dtype, device)
        self.pre_mlp_norm = Gemma3Norm(hidden, eps, dtype, device)
        self.mlp = Gemma3MLP(config, dtype, device, parallel)
        self.post_mlp_norm = Gemma3Norm(hidden, eps, dtype, device)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        hidden = hidden + self.post_attention_norm(self.attn(self.input_norm(hidden), cos, sin, attention))
        return hidden + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(hidden)))

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {
            **self.input_norm.slots(f"{prefix}.input_layernorm"),
            **self.attn.slots(f"{prefix}.self_attn"),
            **self.post_attention_norm.slots(f"{prefix}.post_attention_layernorm"),
            **self.pre_mlp_norm.slots(f"{prefix}.pre_feedforward_layernorm"),
            **self.mlp.slots(f"{prefix}.mlp"),
            **self.post_mlp_norm.slots(f"{prefix}.post_feedforward_layernorm"),
        }


class Gemma3Model(DenseModel):
    """A Gemma 3 decoder with uninitialised parameters on `device`; arguments and errors as in DenseModel."""

    config: Gemma3Config

    def __init__(
        self,
        config: Gemma3Config,
        dtype: torch.dtype,
        device: torch.device | str,
        max_len: int | None = None,
        parallel: TensorParallel = SINGLE_RANK,
    ):
        super().__init__(config, dtype, device, max_len, parallel)
        self.norm = Gemma3Norm(config.hidden_size, config.rms_norm_eps, dtype, self.device)
        self.local_rotary = RotaryTable(
            config.head_dim, config.local_rope_theta, config.local_rope_scaling, self.max_len, dtype, self.device
        )
        # rounded as in training: in bfloat16, sqrt(3072) is 55.5
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype).item()

    def make_layer(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ) -> nn.Module:
        return Gemma3Layer(config, index, dtype, device, parallel)

    def fused(self, max_rows: int, max_tokens: int) -> Model:
        return Model.fused(self, max_rows, max_tokens)

    def tensors(self) -> DenseTensors:
        raise ModelError(f"{self.config.architecture} has norms that the fused kernels don't compute")

    def embed(self, tokens: Tensor, index: Tensor | None = None) -> Tensor:
        return super().embed(tokens, index) * self.embedding_scale

    def rope(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Positions int64 [T] -> cos and sin of full attention layers, then of sliding layers, each [T, 1, D]."""
        return (*self.rotary(positions), *self.local_rotary(positions))

    def layer(self, index: int, hidden: Tensor, context: ForwardContext) -> Tensor:
        cos, sin, local_cos, local_sin = context.rope
        if self.config.windows[index] is not None:
            cos, sin = local_cos, local_sin
        return self.layers[index](hidden, cos, sin, context.attention)

    def layer_kinds(self) -> Sequence[Hashable]:
        return self.kinds_of_modules()  # the specs have the windows

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits, softcap = super().compute_logits(hidden), self.config.logit_softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap
