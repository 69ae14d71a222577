"""Linear weights carry their format; kernels refuse one that they don't support."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ModelError
from engine.kernels.linear_weight import PLAIN_FORMATS, LinearWeight
from engine.layers.int4 import dequantize, effective_weight, int4_available, unpack_codes
from engine.layers.int4_layout import int4_layout
from engine.loader.cpu_formats import build_low_bit_model
from engine.loader.weights import load_dummy
from engine.models import Decoder, build_model, config_from_dict
from engine.models.decoder_tensors import require_formats

PLAIN = tuple(PLAIN_FORMATS.values())


def make_model(dtype: torch.dtype) -> Decoder:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    model = build_model(config_from_dict(config), dtype, "cpu")
    load_dummy(model)
    return model


@pytest.mark.parametrize(("dtype", "name"), PLAIN_FORMATS.items(), ids=str)
def test_a_plain_weight_is_the_parameter_itself(dtype: torch.dtype, name: str) -> None:
    model = make_model(dtype)
    tensors = model.tensors()
    for weight, layer in ((tensors.layer(1).o, model.layers[1].attn.o), (tensors.head, model.lm_head)):
        assert weight.format == name and weight.scale is None and weight.weight is layer.weight
    require_formats(tensors, PLAIN)


@pytest.mark.skipif(not int4_available(), reason="needs a CPU with AVX2 or AVX-512 and the 4-bit kernel")
def test_a_quantised_weight_is_refused_by_layer_and_format() -> None:
    model = build_low_bit_model(make_model(torch.bfloat16).config, torch.bfloat16)
    load_dummy(model)
    head = model.tensors().head
    layer, storage = model.tensors().layer(0), model.layers[0].attn.qkv
    assert layer.qkv.format == "cpu_int4" and head.format == "fp32"
    assert layer.qkv.weight is storage.packed and layer.qkv.scale is storage.scales
    scale, zero = int4_layout().read_scales(layer.qkv.scale).unbind(-1)
    assert torch.equal(dequantize(unpack_codes(storage), scale, zero), effective_weight(storage))
    assert {"qkv", "qkv.scale", "q_norm"} <= dict(layer.named_tensors()).keys()
    with pytest.raises(ModelError, match="qkv of layer 0 stores its weight in format 'cpu_int4'; .* fp32, bf16, fp16"):
        require_formats(model.tensors(), PLAIN)
    require_formats(model.tensors(), (*PLAIN, "cpu_int4"))


def test_an_unknown_dtype_is_refused_by_its_name() -> None:
    weight = LinearWeight.plain(torch.zeros(2, 2, dtype=torch.float8_e4m3fn))
    with pytest.raises(ModelError, match="down of layer 3 stores its weight in format 'float8_e4m3fn'"):
        weight.require(PLAIN, "down of layer 3")
