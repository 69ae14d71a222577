"""Layers with cross attention, which take a context by keyword and return (hidden, context)."""

from __future__ import annotations

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.cpu import SdpaCoreAttention, layer_spec
from tests.support.megatron_models import config

WIDTH = 32


class Decoder(nn.Module):
    """Three layers over [s, b, h], and a projection of the encoder's states to their context."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = layer_spec(normalization="RMSNorm").submodules
        parts.pre_cross_attn_layernorm = WrappedTorchNorm
        parts.cross_attn_bda = get_bias_dropout_add
        parts.cross_attention = ModuleSpec(
            CrossAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=CrossAttentionSubmodules(
                linear_q=ColumnParallelLinear,
                linear_kv=ColumnParallelLinear,
                core_attention=SdpaCoreAttention,
                linear_proj=RowParallelLinear,
            ),
        )
        settings = config(num_query_groups=4)  # Megatron's cross attention has no groups
        self.layers = nn.ModuleList(TransformerLayer(settings, parts, layer_number=index) for index in (1, 2, 3))
        self.context = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        context = self.context(encoded)
        for layer in self.layers:
            hidden, context = layer(hidden_states=hidden, attention_mask=None, context=context)
        return hidden, context


def train(model: Decoder, outstanding: bool, steps: int = 6) -> list[list[Tensor]]:
    """Return losses, which include the returned context, and gradients of each step of two microbatches."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for micro in range(2):
            generator = torch.Generator().manual_seed(2 * step + micro)
            hidden, context = model(*(torch.randn(12, 2, WIDTH, generator=generator) for _ in range(2)))
            losses.append(hidden.pow(2).mean() + context.pow(2).mean())
            if not outstanding:
                losses[-1].backward()
        for loss in losses if outstanding else ():
            loss.backward()
        log.append([*[loss.detach() for loss in losses], *[parameter.grad.clone() for parameter in model.parameters()]])
        optimizer.step()
    return log


@pytest.mark.parametrize("outstanding", [False, True], ids=["one_at_a_time", "two_outstanding"])
@pytest.mark.parametrize("modules", [[], ["attn", "mlp"]], ids=["layers", "attn_mlp"])
def test_context_input_and_output_match_eager_with_gradients(modules, outstanding):
    expected, model = train(Decoder(), outstanding), Decoder()
    settings = EngineConfig(mode="training", cuda_graph_modules=modules, cuda_graph_warmup_steps=2)
    with Engine(settings) as engine:
        engine.attach(model)
        found = train(model, outstanding)
        assert all(row["failed"] == 0 and row["replays"] > 0 for row in engine.graphs()), engine.graphs()
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
