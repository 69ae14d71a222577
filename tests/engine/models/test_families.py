"""Every family that the engine serves, beside transformers on the same tiny folder."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.layers.activation import ACTIVATIONS
from engine.layers.int4 import Int4Weight, int4_available
from engine.loader.cpu_formats import build_low_bit_model
from engine.loader.weights import load_dummy, load_hf_folder, load_weights
from engine.models import ModelConfig, build_model, config_from_dict
from engine.models.decoder import FUSED_ACTIVATIONS, Decoder, unfused_parts
from engine.models.registry import ENTRIES
from tests.support.attention import prefill_attention
from tests.support.families import FAMILIES, VARIANTS, WITH_EXPERTS, config_of, load_reference, tiny_folder
from tests.support.parity import check_against, make_cache

DENSE = [family for family in FAMILIES if family not in WITH_EXPERTS]
MAX_LEN = 128  # below the trained context of phi3-short, above the one of phi3-long-partial
QUANTISED = {
    "gemma2",
    "phi3",
    "olmo2",
    "starcoder2",
    "cohere",
    "glm4",
    "phi",
    "gpt_neox",
}  # other names, norms and MLPs than Llama's
# variants with a part that no tiny folder of a family has
QUICK = {
    "llama-dynamic",
    "phi3-short",
    "phi3-long-partial",
    "cohere-qk-norms",
    "olmo-clip",
    "gemma2-one-kv-head",
    "glm4_moe-groups",
    "qwen2_moe-windows",
    "olmoe-normalized-biases",
}


def test_every_family_has_a_tiny_folder() -> None:
    assert set(FAMILIES) == {entry.family.model_type for entry in ENTRIES}


@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in VARIANTS)],
)
@torch.no_grad()
def test_logits_and_tensor_names_equal_transformers(family: str, tmp_path: Path) -> None:
    tiny_folder(family, tmp_path)
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu", MAX_LEN)
    stored = load_file(tmp_path / "model.safetensors")
    check_against(load_reference(tmp_path), model)
    exported = dict(model.named_weights())
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_have_the_values_of_transformers(family: str) -> None:
    config = config_of(family)
    [architecture] = [entry.family.architecture for entry in ENTRIES if entry.family.model_type == family]
    values, absent = json.loads(config.to_json_string(use_diff=False)), 0
    for key in values.keys() - {"architectures", "model_type", "dtype", "bos_token_id", "eos_token_id"}:
        rest = {name: value for name, value in values.items() if name != key}
        try:
            found = config_from_dict({**rest, "architectures": [architecture]})
        except ModelError as error:
            assert f"{key!r} must be" in str(error) or key == "num_hidden_layers"  # a key that is needed
            continue
        filled = type(config).from_dict(copy.deepcopy(rest)).to_dict()
        assert found == config_from_dict({**filled, "architectures": [architecture]}), key
        absent += 1
    assert absent > 10


def config_in_engine(family: str, **changes: Any) -> ModelConfig:
    """Return the engine's config of a tiny model."""
    config = config_of(family, **changes)
    [architecture] = [entry.family.architecture for entry in ENTRIES if entry.family.model_type == config.model_type]
    values = json.loads(config.to_json_string(use_diff=False))
    return config_from_dict({**values, "architectures": [architecture]})


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_fused_kernels_compute_every_family(family: str) -> None:
    model = build_model(config_in_engine(family), torch.float32, "cpu", MAX_LEN)
    assert unfused_parts(model) == []


@dataclass(frozen=True, kw_only=True)
class MoodyConfig(ModelConfig):
    """A config of a later family, with an option that no kernel knows."""

    mood: str = "calm"


def test_fused_kernels_refuse_options_by_name() -> None:
    config = config_in_engine("olmo2")
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    for changed, parallel, message in (
        (MoodyConfig(**values), SINGLE_RANK, "mood='calm'"),
        (replace(config, parallel_block=True), SINGLE_RANK, "parallel_block=True with experts, or with norms after"),
        (config, TensorParallel(0, 2), "qk_norm_kind='all_heads' over several ranks"),
    ):
        model = Decoder(changed, torch.float32, "cpu", MAX_LEN, parallel)
        with pytest.raises(ModelError, match=f"parts that no fused kernel computes: {re.escape(message)}"):
            model.fused(1, 1)


def test_kernels_have_every_activation() -> None:
    assert set(FUSED_ACTIVATIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("family", ["llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "phi3-short"])
def test_fused_kernels_read_windows_and_joined_tensors(family: str) -> None:
    model = build_model(config_in_engine(family), torch.float32, "cpu", MAX_LEN)
    load_dummy(model)
    slots, layer = model.weight_slots(), model.tensors().layer(3)
    names = model.config.names
    for found, prefix, parts in ((layer.qkv, "self_attn", names.qkv), (layer.gate_up, "mlp", names.gate_up)):
        stored = [slots[f"model.layers.3.{prefix}.{part}.weight"].read() for part in parts]
        assert torch.equal(found.weight, torch.cat(stored))


@pytest.mark.skipif(not int4_available(), reason="needs a CPU with AVX2 or AVX-512 and the 4-bit kernel")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUANTISED else [pytest.mark.slow]) for name in DENSE]
)
@torch.no_grad()
def test_4_bit_weights_compute_what_they_store(family: str) -> None:
    config = config_in_engine(family, intermediate_size=128)
    model = build_low_bit_model(config, torch.bfloat16, MAX_LEN)
    load_dummy(model)
    assert any(isinstance(layer.method, Int4Weight) for layer in model.modules() if hasattr(layer, "method"))
    exact = build_model(config, torch.float32, "cpu", MAX_LEN)
    load_weights(exact, ((name, tensor.float()) for name, tensor in model.named_weights()), family)
    tokens, positions = torch.arange(40) * 31 % 320, torch.arange(40)
    found, wanted = (
        one.compute_logits(one(tokens, positions, prefill_attention(make_cache(one), [(0, 40)], [range(1, 6)])))
        for one in (model, exact)
    )
    assert float((found - wanted).norm() / wanted.norm()) < 0.05
