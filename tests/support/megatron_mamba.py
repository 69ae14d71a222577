"""Hybrid models on a CPU: a Mamba-2 mixer and a stack of Mamba, attention, MLP and MoE layers in plain torch.

Megatron's MambaMixer needs mamba-ssm and a GPU. The layers around the mixer are Megatron's. Needs megatron-core 0.16;
its final norm needs Transformer Engine, so build the model with `post_process=False`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor, nn

from graph_cache.adapters.megatron.cpu import layer_spec


class ReferenceMixer(nn.Module):
    """Mamba-2 mixer whose cost is quadratic in the length: [s, b, h] -> ([s, b, h], None).

    Takes Megatron's arguments and sizes (`mamba_num_heads`, `mamba_head_dim`, `mamba_num_groups`, `mamba_state_dim`).
    Documents of a packed batch, of b = 1, are kept apart by sequence indices.
    """

    def __init__(self, config: Any, d_model: int, layer_number: int, **options: Any):
        super().__init__()
        self.head_dim, self.groups, self.state = (
            config.mamba_head_dim,
            config.mamba_num_groups,
            config.mamba_state_dim,
        )
        self.heads = config.mamba_num_heads or 2 * d_model // self.head_dim
        self.inner = self.heads * self.head_dim
        channels = self.inner + 2 * self.groups * self.state
        self.in_proj = nn.Linear(d_model, self.inner + channels + self.heads, bias=False, dtype=config.params_dtype)
        self.conv = nn.Parameter(torch.randn(channels, 4, dtype=config.params_dtype) / 2)
        self.dt_bias = nn.Parameter(torch.rand(self.heads, dtype=config.params_dtype))
        self.A_log = nn.Parameter(torch.rand(self.heads, dtype=config.params_dtype))
        self.D = nn.Parameter(torch.ones(self.heads, dtype=config.params_dtype))
        self.out_proj = nn.Linear(self.inner, d_model, bias=False, dtype=config.params_dtype)

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, packed_seq_params: PackedSeqParams | None = None
    ) -> tuple[Tensor, None]:
        length, batch, _ = hidden_states.shape
        position = torch.arange(length, device=hidden_states.device)
        seen = position[:, None] >= position  # [to, from]
        if packed_seq_params is not None:
            document = self._create_packed_seq_idx(packed_seq_params, length)[0]
            seen = seen & (document[:, None] == document)
        sizes = [self.inner, self.inner + 2 * self.groups * self.state, self.heads]
        gate, states, dt = self.in_proj(hidden_states.transpose(0, 1)).split(sizes, dim=-1)
        x, b, c = self._convolve(states, seen).split([self.inner, *[self.groups * self.state] * 2], dim=-1)
        x = x.view(batch, length, self.heads, self.head_dim)
        b, c = (
            one.view(batch, length, self.groups, self.state).repeat_interleave(self.heads // self.groups, 2)
            for one in (b, c)
        )
        dt = F.softplus(dt + self.dt_bias)  # [b, s, heads]
        decay = (-dt * self.A_log.exp()).cumsum(1).transpose(1, 2)  # log of the decay up to each position
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~seen, float("-inf"))
        weights = torch.einsum("bthn,bshn->bhts", c, b) * between.exp()
        y = torch.einsum("bhts,bshd->bthd", weights, x * dt[..., None]) + x * self.D[:, None]
        y = F.rms_norm(y.flatten(2) * F.silu(gate), (self.inner,))
        return self.out_proj(y).transpose(0, 1), None

    def _convolve(self, states: Tensor, seen: Tensor) -> Tensor:
        """Depthwise causal convolution over four positions within a document, and SiLU. [b, s, c] -> [b, s, c]."""
        out = states * self.conv[:, -1]
        for back in range(1, min(self.conv.shape[1], states.shape[1])):
            same = F.pad(seen.diagonal(-back), (back, 0))  # is the position `back` tokens ago in this document?
            out = out + F.pad(states[:, :-back], (0, 0, back, 0)) * same[:, None] * self.conv[:, -1 - back]
        return F.silu(out)

    def _create_packed_seq_idx(self, packed_seq_params: PackedSeqParams, total_tokens: int) -> Tensor:
        """Return the document of each token, int32 [1, tokens], as Megatron does: by a size read on the host."""
        lengths = packed_seq_params.cu_seqlens_q.diff()
        lengths = torch.cat([lengths, total_tokens - lengths.sum(0, keepdim=True)])
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths).int()[None]


def hybrid_stack_spec(*, num_experts: int | None = None, normalization: str = "RMSNorm") -> ModuleSpec:
    """Return the spec of a MambaStack with layers for the patterns `M`, `*` and `-`, and `E` with experts."""
    dense = layer_spec(normalization=normalization).submodules
    moe = layer_spec(num_experts=num_experts, normalization=normalization).submodules if num_experts else None
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=ModuleSpec(ReferenceMixer), mamba_bda=get_bias_dropout_add
    )
    return ModuleSpec(
        MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=dense.input_layernorm,
                    self_attention=dense.self_attention,
                    self_attn_bda=dense.self_attn_bda,
                ),
            ),
            mlp_layer=ModuleSpec(MLPLayer, submodules=_feed_forward(dense)),
            **({} if moe is None else {"moe_layer": ModuleSpec(MoETransformerLayer, submodules=_feed_forward(moe))}),
        ),
    )


def _feed_forward(layer: Any) -> TransformerLayerSubmodules:
    return TransformerLayerSubmodules(pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda)
