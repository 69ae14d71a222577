"""Kinds of decoder layers: a run of one layer of each kind launches every kernel that a whole step launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.loader.weights import load_hf_folder
from engine.models import build_model, config_from_dict
from engine.models.decoder import Decoder
from engine.models.layer import GatedMLP
from tests.support import gemma3, qwen3_moe

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "vocab_size": 199, "hidden_size": 48, "num_hidden_layers": 4, "intermediate_size": 80, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_theta": 1e4, "attention_bias": False,
}  # fmt: skip


def dense_model() -> Decoder:
    model = build_model(config_from_dict(CONFIG), torch.float32, "cpu", 64)
    assert isinstance(model, Decoder)
    return model


def layers_run(model) -> list[int]:
    """Return the indices of the layers that `run_layers` runs now."""
    ran: list[int] = []
    layer, model.layer = model.layer, lambda index, hidden, context: (ran.append(index), hidden)[1]
    try:
        model.run_layers(torch.zeros(1), None)
    finally:
        model.layer = layer
    return ran


def layers_of_each_kind(model, page_tables=None) -> list[int]:
    with model.one_layer_of_each_kind(page_tables or [0] * model.config.num_layers):
        return layers_run(model)


def test_a_dense_model_has_one_kind_of_layer():
    model = dense_model()
    assert layers_of_each_kind(model) == [0]
    assert layers_run(model) == [0, 1, 2, 3]


def test_the_block_ends_with_an_error_too():
    model = dense_model()
    with pytest.raises(ZeroDivisionError), model.one_layer_of_each_kind([0] * 4):
        raise ZeroDivisionError
    assert layers_run(model) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        (gemma3.SHAPES, [0, 2]),  # every third layer attends to all tokens
        (qwen3_moe.SHAPES | {"mlp_only_layers": [2]}, [0, 2]),
    ],
)
def test_windows_and_experts_make_kinds_of_their_own(tmp_path, shapes, wanted):
    support = gemma3 if "sliding_window_pattern" in shapes else qwen3_moe
    support.reference_model(**shapes).save_pretrained(tmp_path)
    _, model = load_hf_folder(str(tmp_path), torch.float32, torch.device("cpu"), 64)
    assert layers_of_each_kind(model) == wanted


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(49)[1:],  # 4 bytes from an aligned address
        torch.ones(48, dtype=torch.float64),
        torch.ones(96)[::2],
        torch.ones(52),
    ],
)
def test_another_alignment_dtype_or_layout_is_another_kind(weight):
    model = dense_model()
    model.layers[2].input_norm.weight.data = weight
    assert layers_of_each_kind(model) == [0, 2]


def test_other_modules_and_other_page_tables_make_other_kinds():
    class OtherMLP(GatedMLP):
        """An MLP with the same parameters."""

    model = dense_model()
    model.layers[3].mlp.__class__ = OtherMLP
    assert layers_of_each_kind(model) == [0, 3]
    assert layers_of_each_kind(model, [0, 1, 0, 0]) == [0, 1, 3]


def test_all_layers_of_a_model_that_calls_them_in_its_own_way_differ():
    class Mixed(Decoder):
        def layer(self, index, hidden, context):
            return super().layer(index, hidden, context) if index % 2 else hidden

    model = Mixed(config_from_dict(CONFIG), torch.float32, "cpu", 64)
    assert layers_of_each_kind(model) == [0, 1, 2, 3]


def test_layers_that_store_other_keys_are_another_kind():
    model = dense_model()
    first, *others = model.cache_specs()
    model.cache_specs = lambda: (replace(first, scale=0.5), *others)
    assert layers_of_each_kind(model) == [0, 1]
