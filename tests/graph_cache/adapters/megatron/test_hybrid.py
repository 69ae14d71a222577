"""Graphs of the parts of a Megatron-Core hybrid model of Mamba, attention and MLP layers.

Layers and stack are Megatron's. The mixer of the Mamba layers needs a GPU and is replaced by a gated convolution.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.cpu import layer_spec
from tests.support.megatron_models import VOCAB, config, tokens

LAYERS = {
    "all": ([], ["decoder.layers.0", "decoder.layers.1", "decoder.layers.2", "decoder.layers.3"]),
    "mamba": (["mamba"], ["decoder.layers.0", "decoder.layers.3"]),
    "attn": (["attn"], ["decoder.layers.1.attn"]),
    "attn_mlp": (["attn", "mlp"], ["decoder.layers.1.attn", "decoder.layers.2.mlp"]),
}


class Mixer(nn.Module):
    """[s, b, h] -> ([s, b, h], None): gated causal convolution over four positions."""

    def __init__(self, config, d_model, layer_number, pg_collection, pp_layer_offset=0, **more):
        super().__init__()
        self.conv = nn.Conv1d(d_model, d_model, 4, groups=d_model)
        self.gate = nn.Linear(d_model, d_model)

    def forward(self, hidden_states: Tensor, inference_context=None, packed_seq_params=None):
        mixed = self.conv(F.pad(hidden_states.permute(1, 2, 0), (3, 0))).permute(2, 0, 1)
        return mixed * torch.sigmoid(self.gate(hidden_states)), None


def hybrid(pattern="M*-M") -> MambaModel:
    torch.manual_seed(0)
    whole = layer_spec(normalization="RMSNorm").submodules
    stack = ModuleSpec(
        MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=WrappedTorchNorm, mixer=ModuleSpec(Mixer), mamba_bda=get_bias_dropout_add
                ),
            ),
            attention_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=whole.input_layernorm,
                    self_attention=whole.self_attention,
                    self_attn_bda=whole.self_attn_bda,
                ),
            ),
            mlp_layer=ModuleSpec(
                MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda
                ),
            ),
        ),
    )
    return MambaModel(
        config(num_layers=len(pattern), hidden_dropout=0.1, is_hybrid_model=True),
        stack,
        VOCAB,
        64,
        hybrid_override_pattern=pattern,
        post_process=False,
    )  # the final norm needs Transformer Engine


def train(model, steps=8):
    torch.manual_seed(1)
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        ids, positions = tokens(step)
        loss = model(ids, positions, None).pow(2).mean()
        loss.backward()
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
        optimizer.step()
    return log


@pytest.mark.parametrize("name", LAYERS)
def test_a_hybrid_model_equals_eager(name):
    modules, names = LAYERS[name]
    expected = train(hybrid())
    model = hybrid()
    with Engine(EngineConfig(mode="training", cuda_graph_modules=modules, cuda_graph_warmup_steps=2)) as engine:
        assert engine.attach(model) == names
        found = train(model)
        rows = engine.graphs()
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), f"step {step}"
    assert all(row["graphs"] == 1 and row["replays"] == 6 and set(row["eager"]) == {"warming_up"} for row in rows)
