"""A decoder layer, composed of the parts that a model's config selects: norms, attention, and an MLP or experts.

Attention is passed in as a callable, so a layer is independent of KV pages, batches and requests.

Shapes: T tokens, h hidden size, H query heads, KV key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.layers.activation import ACTIVATIONS, gated
from engine.layers.linear import Linear
from engine.layers.moe import Experts, MoE, Router, SharedExpert, SigmoidRouter
from engine.layers.norm import AllHeadsNorm, HeadNorm, LayerNorm, PerHeadLayerNorm, RMSNorm
from engine.layers.parallel import ColumnParallelLinear, rank_rows, split_slot
from engine.layers.rotary import rotate
from engine.layers.weight_slot import Slot, WeightSlot
from engine.models.config import ModelConfig
from engine.models.interface import ForwardContext
from engine.models.options import LayerOptions

Norm = RMSNorm | LayerNorm
LAYER_NORMS = {
    "layer": {"weight": True, "bias": False},
    "layer_bias": {"weight": True, "bias": True},
    "layer_plain": {"weight": False, "bias": False},
}


def make_norm(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Norm:
    """Create a norm of hidden states, of the kind `config.norm`."""
    size, eps = config.hidden_size, config.rms_norm_eps
    if config.norm == "rms":
        return RMSNorm(size, eps, dtype, device, weight_offset=config.norm_offset)
    return LayerNorm(size, eps, dtype, device, weight_offset=config.norm_offset, **LAYER_NORMS[config.norm])


def make_qk_norm(config: ModelConfig, options: LayerOptions) -> HeadNorm | AllHeadsNorm | PerHeadLayerNorm | None:
    """Create the norm of q and k that `config` selects, for the heads of this rank; None: it has none."""
    if not config.qk_norm:
        return None
    heads, kv_heads = config.num_heads // options.parallel.size, config.num_kv_heads // options.parallel.size
    shape, eps = (heads, kv_heads, config.head_dim), config.rms_norm_eps
    if config.qk_norm_kind == "head":
        return HeadNorm(*shape, eps, options.dtype, options.device, weight_offset=config.norm_offset)
    norms: dict[str, type[AllHeadsNorm | PerHeadLayerNorm]] = {"all_heads": AllHeadsNorm, "layer": PerHeadLayerNorm}
    return norms[config.qk_norm_kind](*shape, eps, options.dtype, options.device, options.parallel)


class SelfAttention(nn.Module):
    """Projections, norms of q and k, and RoPE around the attention of the context: normed hidden [T, h] -> [T, h].

    `prefix` begins the names of its tensors.
    """

    def __init__(self, config: ModelConfig, index: int, prefix: str, options: LayerOptions):
        super().__init__()
        ranks, hidden = options.parallel.size, config.hidden_size
        self.index = index
        self.heads, self.kv_heads = config.num_heads // ranks, config.num_kv_heads // ranks
        self.head_dim = config.head_dim
        rope = config.rope_index(index)
        self.rope = None if rope is None else slice(2 * rope, 2 * rope + 2)  # cos and sin in context.rope
        self.interleaved, self.clip = config.rope_interleaved, config.qkv_clip
        q_rows, kv_rows = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        names, parts = config.names, {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.by_group = names.qkv_by_group
        if self.by_group:  # ranks split the tensor as it is: each has the rows of whole groups
            parts = {names.qkv[0]: q_rows + 2 * kv_rows}
        self.qkv = split_linear(names.qkv, parts, hidden, prefix, options, bias=config.attention_bias)
        self.o = options.row_linear(prefix, {names.output: hidden}, q_rows, bias=config.output_bias)
        self.qk_norm = make_qk_norm(config, options)
        self.parallel, self.sinks = options.parallel, None
        if config.attention_sinks:
            sinks = torch.empty(self.heads, dtype=options.dtype, device=options.device)
            self.sinks = nn.Parameter(sinks, requires_grad=False)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(x)
        if self.by_group:
            qkv = heads_of_groups(qkv, kv_heads, self.head_dim)
        qkv = qkv.view(-1, heads + 2 * kv_heads, self.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if self.clip is not None:
            qk, v = qk.clamp(-self.clip, self.clip), v.clamp(-self.clip, self.clip)
        if self.rope is not None:
            qk = rotate(qk, *context.rope[self.rope], interleaved=self.interleaved)
        sinks = () if self.sinks is None else (self.sinks,)
        out = context.attention(self.index, qk[:, :heads], qk[:, heads:], v, *sinks)
        return self.o(out)

    def slots(self, prefix: str) -> dict[str, Slot]:
        slots: dict[str, Slot] = {**self.qkv.slots(prefix), **self.o.slots(prefix)}
        if self.qk_norm is not None:
            slots |= self.qk_norm.slots(prefix)
        if self.sinks is not None:
            slots[f"{prefix}.sinks"] = split_slot(WeightSlot(self.sinks), 0, self.parallel)
        return slots


def heads_of_groups(qkv: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """Order qkv [T, (H + 2 KV) * D], which has each KV head's queries, key and value together, as all q, all k, all v.

    Returns a new tensor [T, H + 2 KV, D].
    """
    groups = qkv.view(len(qkv), kv_heads, -1, head_dim)
    return torch.cat((groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]), dim=1)


def split_linear(
    names: tuple[str, ...], parts: dict[str, int], inputs: int, prefix: str, options: LayerOptions, *, bias: bool
) -> ColumnParallelLinear:
    """Create a projection with the rows of several `parts`, whose tensors have these `names`, or one name together."""
    if len(names) == 1:
        return options.column_linear(prefix, parts, inputs, bias=bias, joined=names[0])
    return options.column_linear(prefix, dict(zip(names, parts.values(), strict=True)), inputs, bias=bias)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one GEMM: normed hidden [T, h] -> [T, h].

    `prefix` begins the names of its tensors.
    """

    def __init__(self, config: ModelConfig, prefix: str, options: LayerOptions):
        super().__init__()
        width, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.act = gated(config.activation)
        names, parts = config.names, {"gate_proj": width, "up_proj": width}
        self.gate_up = split_linear(names.gate_up, parts, hidden, prefix, options, bias=bias)
        self.down = options.row_linear(prefix, {names.down: hidden}, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate, up))

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {**self.gate_up.slots(prefix), **self.down.slots(prefix)}


class PlainMLP(nn.Module):
    """down(act(up(x))): normed hidden [T, h] -> [T, h]. `prefix` begins the names of its tensors."""

    def __init__(self, config: ModelConfig, prefix: str, options: LayerOptions):
        super().__init__()
        width, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.act = ACTIVATIONS[config.activation]
        self.up = options.column_linear(prefix, {config.names.gate_up[0]: width}, hidden, bias=bias)
        self.down = options.row_linear(prefix, {config.names.down: hidden}, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {**self.up.slots(prefix), **self.down.slots(prefix)}


def make_mlp(config: ModelConfig, index: int, prefix: str, options: LayerOptions) -> GatedMLP | PlainMLP | MoE:
    """Create the MLP or the experts of layer `index`; `prefix` begins the names of the layer's tensors."""
    if index in config.sparse_layers:
        return experts(config, prefix, options)
    return (GatedMLP if config.gated_mlp else PlainMLP)(config, f"{prefix}.mlp", options)


def experts(config: ModelConfig, prefix: str, options: LayerOptions) -> MoE:
    """Create the router, the experts and the shared expert of the layer whose tensors' names begin with `prefix`."""
    hidden, names, parallel = config.hidden_size, config.expert_names, options.parallel
    parts = rank_rows({names.gate: config.moe_intermediate_size, names.up: config.moe_intermediate_size}, parallel)
    sizes = (config.num_experts, config.experts_per_token, hidden)
    shared: dict[str, Any] = {
        "normalize": config.normalize_weights,
        "dtype": options.dtype,
        "device": options.device,
    }
    router: Router | SigmoidRouter
    if config.sigmoid_routing is None:
        router = Router(*sizes, **shared, bias=config.router_bias)
    else:
        router = SigmoidRouter(*sizes, config.sigmoid_routing, **shared)
    routed = Experts(
        config.num_experts,
        hidden,
        parts[names.gate],
        dtype=options.dtype,
        device=options.device,
        method=options.methods(f"{prefix}.{names.experts}", parts, hidden),
        bias=config.expert_bias,
        activation=config.expert_activation,
        parallel=parallel,
    )
    return MoE(router, routed, _shared_expert(config, prefix, options), names)


def _shared_expert(config: ModelConfig, prefix: str, options: LayerOptions) -> SharedExpert | None:
    if not config.shared_expert_size:
        return None
    names = config.expert_names
    mlp = GatedMLP(replace(config, intermediate_size=config.shared_expert_size), f"{prefix}.{names.shared}", options)
    gate = None
    if config.shared_expert_gate:
        part = names.shared_gate.rpartition(".")[2]
        gate = Linear({part: 1}, config.hidden_size, bias=False, dtype=options.dtype, device=options.device)
    return SharedExpert(mlp, gate)


class DecoderLayer(nn.Module):
    """Attention and an MLP or experts, each with a residual connection: hidden [T, h] -> hidden [T, h].

    Norms are where `config.norms` names them: before or after attention and the MLP, or both. In a parallel block the
    MLP reads what attention reads. `prefix` begins its names in a checkpoint.
    """

    def __init__(self, config: ModelConfig, index: int, prefix: str, options: LayerOptions):
        super().__init__()
        self.norms, self.parallel_block, self.residual_scale = (
            config.norms,
            config.parallel_block,
            config.residual_scale,
        )

        def norm(name: str | None) -> Norm | None:
            return None if name is None else make_norm(config, options.dtype, options.device)

        self.input_norm = norm(self.norms.before_attention)
        self.attention_name = config.names.attention
        self.attn = SelfAttention(config, index, f"{prefix}.{self.attention_name}", options)
        self.attn_out_norm = norm(self.norms.after_attention)
        self.post_norm = norm(self.norms.before_mlp)
        self.mlp = make_mlp(config, index, prefix, options)
        self.mlp_out_norm = norm(self.norms.after_mlp)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        normed = hidden if self.input_norm is None else self.input_norm(hidden)
        x = self.attn(normed, context)
        x = self._scaled(x if self.attn_out_norm is None else self.attn_out_norm(x))
        if self.parallel_block:
            return hidden + x + self._mlp(normed if self.post_norm is None else self.post_norm(hidden), context)
        hidden = hidden + x
        return hidden + self.mlp_part(hidden, context)

    def mlp_part(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return what the MLP or the experts add to hidden [T, h], their norms and their factor included."""
        return self._mlp(hidden if self.post_norm is None else self.post_norm(hidden), context)

    def _mlp(self, x: Tensor, context: ForwardContext) -> Tensor:
        x = self.mlp(x, context.valid) if isinstance(self.mlp, MoE) else self.mlp(x)
        return self._scaled(x if self.mlp_out_norm is None else self.mlp_out_norm(x))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale is None else x * self.residual_scale

    def slots(self, prefix: str) -> dict[str, Slot]:
        norms = {
            self.norms.before_attention: self.input_norm,
            self.norms.after_attention: self.attn_out_norm,
            self.norms.before_mlp: self.post_norm,
            self.norms.after_mlp: self.mlp_out_norm,
        }
        mlp_prefix = prefix if isinstance(self.mlp, MoE) else f"{prefix}.mlp"
        slots = {**self.attn.slots(f"{prefix}.{self.attention_name}"), **self.mlp.slots(mlp_prefix)}
        for name, norm in norms.items():
            if norm is not None:
                slots |= norm.slots(f"{prefix}.{name}")
        return slots
