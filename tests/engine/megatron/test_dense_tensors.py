"""DecoderTensors of a GPTModel: they compute the model's logits; models that are not fusable are rejected."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.torch_norm import L2Norm

from engine import Engine, EngineConfig
from engine.errors import ModelError
from engine.megatron.model import MegatronModel
from engine.models.decoder_tensors import DecoderTensors, HeadLayout
from tests.support.megatron_models import VOCAB, gpt, tokens


def logits_from(tensors: DecoderTensors, ids: torch.Tensor) -> torch.Tensor:
    """Compute logits [T, vocab] of one sequence from the tensors alone."""
    heads, eps = tensors.heads, tensors.config.rms_norm_eps
    hidden = F.embedding(ids, tensors.embedding)

    def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, eps)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [T, ..., D]
        shape = (len(x), *[1] * (x.dim() - 2), heads.dim)
        cos, sin = (table[: len(x)].view(shape) for table in (tensors.cos, tensors.sin))
        return x * cos + x.roll(heads.dim // 2, -1) * sin

    for index in range(tensors.config.num_layers):
        layer = tensors.layer(index)
        q, k, v = heads.cut(F.linear(norm(hidden, layer.input_norm.weight), layer.qkv.weight, layer.qkv_bias))
        q, k = rotate(norm(q, layer.q_norm)), rotate(norm(k, layer.k_norm))
        q, k, v = q.flatten(1, 2), *(x.repeat_interleave(heads.heads // heads.kv_heads, 1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        hidden = hidden + F.linear(attended, layer.o.weight, layer.o_bias)
        gate, up = F.linear(norm(hidden, layer.post_norm.weight), layer.gate_up.weight, layer.gate_up_bias).chunk(2, -1)
        hidden = hidden + F.linear(F.silu(gate) * up, layer.down.weight, layer.down_bias)
    return F.linear(norm(hidden, tensors.norm.weight), tensors.head.weight)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_layernorm": True, "tied": True},
        {"add_bias_linear": True},
        {"add_qkv_bias": True, "num_query_groups": 4},
    ],
    ids=str,
)
def test_dense_tensors_compute_the_models_logits(options):
    model = gpt(**options).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(torch.randn(parameter.shape) * 0.3)
    ids = tokens(3, batch=1, length=20)[0][0]
    with torch.no_grad():
        wanted = model(ids[None], torch.arange(20)[None], None)[0]
        found = logits_from(MegatronModel(model).tensors(), ids)
    torch.testing.assert_close(found, wanted[:, :VOCAB], rtol=1e-4, atol=1e-5)


def test_dense_tensors_follow_replaced_parameters():
    model = gpt()
    tensors = MegatronModel(model).tensors()
    fc1 = model.decoder.layers[1].mlp.linear_fc1
    assert tensors.layer(1).gate_up.weight is fc1.weight
    fc1.weight = torch.nn.Parameter(fc1.weight.data.clone())
    assert tensors.layer(1).gate_up.weight is fc1.weight


@pytest.mark.parametrize("by_group", [False, True])
def test_head_layout_splits_qkv_without_copies(by_group):
    layout = HeadLayout(4, 2, 3, by_group)
    names = (
        ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]
        if by_group
        else ["q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1"]
    )
    row = torch.arange(len(names)).repeat_interleave(3).expand(5, -1).contiguous()
    q, k, v = layout.cut(row)
    assert q.shape == (5, 2, 2, 3) and k.shape == v.shape == (5, 2, 3) and layout.width == row.shape[1]
    cut = [[names[int(i)] for i in part[0, ..., 0].flatten()] for part in (q, k, v)]
    assert cut == [["q0", "q1", "q2", "q3"], ["k0", "k1"], ["v0", "v1"]]
    assert {part.untyped_storage().data_ptr() for part in (q, k, v)} == {row.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma=True"),
        ({"activation_func": F.gelu}, "activation_func gelu"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
    ],
)
def test_an_unsupported_setting_is_rejected(changes, message):
    model = gpt()
    megatron_model = MegatronModel(model)
    for name, value in changes.items():
        object.__setattr__(model.config, name, value)
    with pytest.raises(ModelError, match=message):
        megatron_model.tensors()


def test_an_adapter_that_replaces_a_projection_is_rejected():
    class Adapter(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module):
            super().__init__()
            self.inner, self.weight = inner, inner.weight

    model = gpt()
    megatron_model = MegatronModel(model)
    layer = model.decoder.layers[1]
    layer.mlp.linear_fc2 = Adapter(layer.mlp.linear_fc2)
    with pytest.raises(ModelError, match="layers.1.mlp.linear_fc2 is a .*Adapter"):
        megatron_model.tensors()


def with_l2_norms(model):
    for layer in model.decoder.layers:
        layer.self_attention.q_layernorm = L2Norm(8)


def with_no_norm(model):
    model.decoder.layers[0].pre_mlp_layernorm = IdentityOp()


def with_a_side_branch(model):
    linear = model.decoder.layers[0].mlp.linear_fc1
    linear.lora = torch.nn.Linear(32, 96)


def with_a_forward_of_its_own(model):
    linear = model.decoder.layers[0].mlp.linear_fc1
    own = linear.forward
    linear.forward = lambda x: own(2 * x)


def with_another_eps(model):
    model.decoder.layers[1].input_layernorm.eps = 0.5


def without_a_residual(model):
    model.decoder.layers[1].mlp_bda = IdentityFuncOp()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_l2_norms, "L2Norm as q_layernorm"),
        (with_no_norm, "post_norm of layer 0 is missing"),
        (with_a_side_branch, "lora.weight is a parameter"),
        (with_a_forward_of_its_own, "linear_fc1 has a replaced forward"),
        (with_another_eps, "input_layernorm has an eps of 0.5"),
        (without_a_residual, "residual of mlp_bda"),
    ],
)
def test_a_modified_model_is_rejected(change, message):
    model = gpt()
    megatron_model = MegatronModel(model)
    megatron_model.tensors()
    change(model)
    with pytest.raises(ModelError, match=message):
        megatron_model.tensors()


def test_attached_training_graphs_keep_a_model_fusable():
    model = gpt()
    training = Engine(EngineConfig(mode="training"))
    training.attach(model)
    MegatronModel(model).tensors()
    training.detach()


def test_the_head_omits_vocabulary_padding():
    model = gpt()
    megatron_model = MegatronModel(model, vocab_size=90)
    head = megatron_model.tensors().head.weight
    assert head.shape == (90, 32) and head.data_ptr() == model.output_layer.weight.data_ptr()


def test_parameters_of_another_dtype_are_rejected():
    model = gpt()
    megatron_model = MegatronModel(model)
    weight = model.decoder.layers[0].self_attention.linear_proj.weight
    weight.data = weight.data.double()
    with pytest.raises(ModelError, match="o of layer 0 is a Tensor .*float64"):
        megatron_model.tensors()


def test_a_parameter_of_another_shape_is_rejected():
    model = gpt()
    megatron_model = MegatronModel(model)
    fc2 = model.decoder.layers[1].mlp.linear_fc2
    fc2.weight = torch.nn.Parameter(fc2.weight.data[:, :40].clone())
    with pytest.raises(ModelError, match=r"linear_fc2.weight has shape \[32, 40\], \[32, 48\] is needed"):
        megatron_model.tensors()
