"""A decoder layer, composed of the parts that a model's config selects: norms, attention, and an MLP or experts.

Attention is passed in as a callable, so a layer is independent of KV pages, batches and requests.

Shapes: T tokens, h hidden size, H query heads, KV key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.activation import ACTIVATIONS
from engine.layers.moe import MoE
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import rotate
from engine.layers.weight_slot import Slot
from engine.models.config import ModelConfig
from engine.models.interface import ForwardContext
from engine.models.options import LayerOptions


class SelfAttention(nn.Module):
    """Projections, head norms and RoPE around the attention of the context: normed hidden [T, h] -> [T, h].

    `prefix` begins the names of its tensors.
    """

    def __init__(self, config: ModelConfig, index: int, prefix: str, options: LayerOptions):
        super().__init__()
        ranks, hidden = options.parallel.size, config.hidden_size
        self.index = index
        self.heads, self.kv_heads = config.num_heads // ranks, config.num_kv_heads // ranks
        self.head_dim = config.head_dim
        self.rope = slice(2, 4) if config.uses_local_rope(index) else slice(0, 2)  # cos and sin in context.rope
        q_rows, kv_rows = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.qkv = options.column_linear(
            prefix, {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, hidden, bias=config.attention_bias
        )
        self.o = options.row_linear(prefix, {"o_proj": hidden}, q_rows, bias=config.output_bias)
        self.qk_norm = None
        if config.qk_norm:
            self.qk_norm = HeadNorm(
                self.heads,
                self.kv_heads,
                self.head_dim,
                config.rms_norm_eps,
                options.dtype,
                options.device,
                weight_offset=config.norm_offset,
            )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, self.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, *context.rope[self.rope])
        out = context.attention(self.index, qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :])
        return self.o(out)

    def slots(self, prefix: str) -> dict[str, Slot]:
        slots: dict[str, Slot] = {**self.qkv.slots(prefix), **self.o.slots(prefix)}
        if self.qk_norm is not None:
            slots |= self.qk_norm.slots(prefix)
        return slots


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one GEMM: normed hidden [T, h] -> [T, h].

    `prefix` begins the names of its tensors.
    """

    def __init__(self, config: ModelConfig, prefix: str, options: LayerOptions):
        super().__init__()
        width, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.act = ACTIVATIONS[config.activation]
        self.gate_up = options.column_linear(prefix, {"gate_proj": width, "up_proj": width}, hidden, bias=bias)
        self.down = options.row_linear(prefix, {"down_proj": hidden}, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {**self.gate_up.slots(prefix), **self.down.slots(prefix)}


def experts(config: ModelConfig, prefix: str, options: LayerOptions) -> MoE:
    """Create the router and experts of a layer."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    return MoE(
        config.num_experts,
        config.experts_per_token,
        hidden,
        width,
        normalize=config.normalize_weights,
        dtype=options.dtype,
        device=options.device,
        method=options.methods(f"{prefix}.experts", {"gate_proj": width, "up_proj": width}, hidden),
    )


class DecoderLayer(nn.Module):
    """Attention and an MLP or experts, each with a residual connection: hidden [T, h] -> hidden [T, h].

    Norms are where `config.norms` names them: before or after attention and the MLP, or both. `prefix` begins its names
    in a checkpoint.
    """

    def __init__(self, config: ModelConfig, index: int, prefix: str, options: LayerOptions):
        super().__init__()
        self.norms = config.norms

        def norm(name: str | None) -> RMSNorm | None:
            size, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
            return None if name is None else RMSNorm(size, eps, options.dtype, options.device, weight_offset=offset)

        self.input_norm = norm(self.norms.before_attention)
        self.attn = SelfAttention(config, index, f"{prefix}.self_attn", options)
        self.attn_out_norm = norm(self.norms.after_attention)
        self.post_norm = norm(self.norms.before_mlp)
        mlp = experts if index in config.sparse_layers else GatedMLP
        self.mlp: GatedMLP | MoE = mlp(config, f"{prefix}.mlp", options)
        self.mlp_out_norm = norm(self.norms.after_mlp)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        x = hidden if self.input_norm is None else self.input_norm(hidden)
        x = self.attn(x, context)
        hidden = hidden + (x if self.attn_out_norm is None else self.attn_out_norm(x))
        return hidden + self.mlp_part(hidden, context)

    def mlp_part(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return what the MLP or the experts add to hidden [T, h], their norms included."""
        x = hidden if self.post_norm is None else self.post_norm(hidden)
        x = self.mlp(x, context.valid) if isinstance(self.mlp, MoE) else self.mlp(x)
        return x if self.mlp_out_norm is None else self.mlp_out_norm(x)

    def slots(self, prefix: str) -> dict[str, Slot]:
        norms = {
            self.norms.before_attention: self.input_norm,
            self.norms.after_attention: self.attn_out_norm,
            self.norms.before_mlp: self.post_norm,
            self.norms.after_mlp: self.mlp_out_norm,
        }
        slots = {**self.attn.slots(f"{prefix}.self_attn"), **self.mlp.slots(f"{prefix}.mlp")}
        for name, norm in norms.items():
            if norm is not None:
                slots |= norm.slots(f"{prefix}.{name}")
        return slots
