"""Qwen3-MoE: config.json, logits against transformers, both layouts of experts, updates and dummy weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.kv_cache import KVCache
from engine.distributed.tensor_parallel import TensorParallel
from engine.errors import ModelError, WeightUpdateError
from engine.layers.moe import MoE
from engine.loader.cpu_formats import build_low_bit_model
from engine.loader.weights import load_dummy, load_hf_folder, load_weights, stage_update
from engine.megatron.config import transformer_config_values
from engine.models import Decoder, build_model, config_from_dict, supported_architectures
from engine.models.layer import GatedMLP
from tests.support.attention import decode_attention, prefill_attention
from tests.support.qwen3_moe import SHAPES, reference_model

PAGE, VOCAB = 16, SHAPES["vocab_size"]
CASES: dict[str, dict[str, Any]] = {
    "normalized": {"norm_topk_prob": True},
    "softmax-of-all": {"norm_topk_prob": False, "num_experts_per_tok": 1},
    "dense-layers": {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": True},
    "biases-tied-all-experts": {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 8},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VALUES = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **SHAPES}


def make_cache(model: Decoder) -> KVCache:
    return KVCache(model.cache_specs(), 24, PAGE, model.dtype, model.device)


def make_model(seed: int = 0, device: str = "cpu", **changes: Any) -> Decoder:
    model = build_model(config_from_dict({**VALUES, **changes}), torch.float32, device)
    load_dummy(model, seed)
    return model


# ---- config.json ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts_are_read(key: str) -> None:
    values = {name: value for name, value in VALUES.items() if name != "num_experts"}
    config = config_from_dict({**values, key: 5, "mlp_only_layers": [3], "decoder_sparse_step": 2})
    assert "Qwen3MoeForCausalLM" in supported_architectures()
    assert (config.num_experts, config.experts_per_token, config.moe_intermediate_size) == (5, 3, 24)
    assert config.sparse_layers == {1}
    assert not config.normalize_weights and config.qk_norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "'num_experts' must be a whole number"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' must be a whole number from 1 to 8, found 9"),
        ({"moe_intermediate_size": 20}, "'moe_intermediate_size' must be a multiple of 8, found 20"),
        ({"hidden_size": 36}, "'hidden_size' must be a multiple of 8, found 36"),
        ({"moe_intermediate_size": 0}, "'moe_intermediate_size' must be a whole number"),
        ({"mlp_only_layers": "all"}, "'mlp_only_layers' must be a list of layer indices, found 'all'"),
        ({"mlp_only_layers": [-1]}, r"'mlp_only_layers' must be a list of layer indices, found \[-1\]"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' must be a whole number"),
        ({"norm_topk_prob": "yes"}, "'norm_topk_prob' must be true or false"),
        ({"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised by 'hqq' are not supported"),
    ],
)
def test_unsupported_values_are_rejected_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_dict({**VALUES, **changes})


def test_a_sliding_window_applies_to_all_layers() -> None:
    assert config_from_dict({**VALUES, "use_sliding_window": True, "sliding_window": 32}).windows == (32,) * 4
    assert config_from_dict({**VALUES, "use_sliding_window": False, "sliding_window": 32}).windows == ()
    assert config_from_dict({**VALUES, "use_sliding_window": True, "sliding_window": None}).windows == ()


# ---- logits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_transformers_in_prefill_and_decode(name: str, device: str, tmp_path: Path) -> None:
    reference = reference_model(**CASES[name])
    reference.save_pretrained(tmp_path)
    _, model = load_hf_folder(tmp_path, torch.float32, device)
    kinds = [MoE if index in model.config.sparse_layers else GatedMLP for index in range(4)]
    assert [type(layer.mlp) for layer in model.layers] == kinds
    backend = "triton" if device == "cuda" else "sdpa"

    # two sequences of different lengths, on unordered pages, and a padded row in each decode step
    lengths, pages = (37, 22), ([9, 3, 14, 2], [4, 17, 6, 12])
    texts = torch.randint(0, VOCAB, (2, 57), generator=torch.Generator().manual_seed(1))
    expected = [reference(text[None]).logits[0].to(device) for text in texts]
    cache = make_cache(model)
    tokens = torch.cat([text[:length] for text, length in zip(texts, lengths, strict=True)]).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    attention = prefill_attention(cache, [(0, length) for length in lengths], pages, backend)
    logits = model.compute_logits(model(tokens, positions, attention))
    worst = (logits - torch.cat([e[:n] for e, n in zip(expected, lengths, strict=True)])).abs().max()
    table, rows = torch.tensor([*pages, [0] * 4], device=device), torch.tensor([1, 2, 0], device=device)
    for step in range(20):
        at = [lengths[0] + step, lengths[1] + step, 0]
        tokens = torch.tensor([int(texts[0, at[0]]), int(texts[1, at[1]]), 0], device=device)
        positions = torch.tensor(at, device=device)
        attention = decode_attention(cache, table, positions, backend)
        logits = model.compute_logits(model(tokens, positions, attention, rows))
        for row in (0, 1):
            worst = max(worst, (logits[row] - expected[row][at[row]]).abs().max())
    assert float(worst) < 1e-3


@torch.no_grad()
def test_bfloat16_rounds_about_as_transformers_does(tmp_path: Path) -> None:
    reference = reference_model(norm_topk_prob=True)
    reference.save_pretrained(tmp_path)
    text = torch.arange(30) * 37 % VOCAB
    exact = reference(text[None]).logits[0]
    theirs = reference.bfloat16()(text[None]).logits[0].float()
    _, model = load_hf_folder(tmp_path, torch.bfloat16, "cpu")
    attention = prefill_attention(make_cache(model), [(0, 30)], [[1, 2]])
    ours = model.compute_logits(model(text, torch.arange(30), attention)).float()
    # a rounded router may choose other experts, so single logits differ
    assert float((ours - exact).norm()) < 1.5 * float((theirs - exact).norm())


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_padded_step_gives_what_the_exact_one_gives(device: str) -> None:
    model = make_model(device=device)
    for parameter in model.parameters():
        parameter.mul_(10.0 if parameter.dim() > 1 else 1.0)
    backend = "triton" if device == "cuda" else "sdpa"
    routed: list[torch.Tensor] = []
    model.layers[2].mlp.experts.register_forward_pre_hook(lambda _, inputs: routed.append(inputs[2]))
    outs = []
    for padding in (0, 1):
        cache = make_cache(model)
        ids, at, rows = torch.zeros(3, 3 + padding, dtype=torch.int64, device=device)
        ids[:3], rows[:3] = torch.tensor([11, 42, 7]), torch.tensor([1, 2, 3])
        table = torch.tensor([[5], [3], [8], [0]][: 3 + padding], device=device)
        hidden = model(ids, at, decode_attention(cache, table, at, backend), rows)
        outs.append(model.compute_logits(hidden[:3]))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=0)
    assert routed[1][3].tolist() == [-1, -1, -1]
    assert torch.equal(routed[0], routed[1][:3])


# ---- weights -------------------------------------------------------------------------------------------------------


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_weights()}


@pytest.mark.parametrize("per_expert", [True, False])
def test_both_layouts_of_a_checkpoint_load(per_expert: bool, tmp_path: Path) -> None:
    reference = reference_model(mlp_only_layers=[2])
    reference.save_pretrained(tmp_path, save_original_format=per_expert)
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    expected = reference.state_dict()
    for index in (0, 1, 3):
        mlp = model.layers[index].mlp
        assert torch.equal(mlp.experts.gate_up.weight, expected[f"model.layers.{index}.mlp.experts.gate_up_proj"])
        assert torch.equal(mlp.experts.down.weight, expected[f"model.layers.{index}.mlp.experts.down_proj"])
        assert torch.equal(mlp.router.weight, expected[f"model.layers.{index}.mlp.gate.weight"])
    exported = weights_of(model)
    assert len(exported) == 2 + 1 + 4 * 8 + 3 * (1 + 8 * 3) + 3
    copy = make_model(seed=5, mlp_only_layers=[2])
    load_weights(copy, exported.items(), "export")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in copy.named_weights())


def test_missing_and_misshapen_experts_are_reported(tmp_path: Path) -> None:
    model = make_model()
    weights = weights_of(model)
    del weights["model.layers.1.mlp.experts.7.up_proj.weight"]
    weights["model.layers.0.mlp.experts.0.down_proj.weight"] = torch.zeros(24, 48)
    weights["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(3, 48, 48)
    with pytest.raises(ModelError) as caught:
        load_weights(model, weights.items(), "the checkpoint")
    for part in (
        "model.layers.1.mlp.experts.7.up_proj.weight is missing",
        "model.layers.0.mlp.experts.0.down_proj.weight has shape [24, 48], expected [48, 24]",
        "model.layers.0.mlp.experts.gate_up_proj is unexpected",
    ):
        assert part in str(caught.value)


def test_updates_are_in_place_and_all_or_nothing_in_both_layouts() -> None:
    model = make_model()
    experts = model.layers[0].mlp.experts
    addresses = experts.gate_up.weight.data_ptr(), experts.down.weight.data_ptr()
    before = experts.gate_up.weight.clone()
    prefix = "model.layers.0.mlp.experts"
    bad = {f"{prefix}.3.gate_proj.weight": torch.ones(24, 48), f"{prefix}.3.up_proj.weight": torch.ones(48, 24)}
    with pytest.raises(WeightUpdateError, match=r"3.up_proj.weight has shape \[48, 24\], expected \[24, 48\]"):
        stage_update(model.weight_slots(), model.split_stacked(bad.items()))
    assert torch.equal(experts.gate_up.weight, before)
    good = {f"{prefix}.3.gate_proj.weight": torch.ones(24, 48), f"{prefix}.down_proj": torch.full((8, 48, 24), 2.0)}
    assert stage_update(model.weight_slots(), model.split_stacked(good.items())) == 1 + 8
    before[3, :24] = 1.0
    assert torch.equal(experts.gate_up.weight, before) and bool((experts.down.weight == 2.0).all())
    assert (experts.gate_up.weight.data_ptr(), experts.down.weight.data_ptr()) == addresses
    with pytest.raises(WeightUpdateError, match="item 0 is int"):
        stage_update(model.weight_slots(), model.split_stacked([3]))


def test_dummy_weights_fill_every_expert() -> None:
    one, same, other = make_model(1), make_model(1), make_model(2)
    for index, layer in enumerate(one.layers):
        for name in ("gate_up", "down"):
            found = getattr(layer.mlp.experts, name).weight
            assert 0.015 < float(found.std(dim=(1, 2)).min()) and float(found.std(dim=(1, 2)).max()) < 0.025
            assert torch.equal(found, getattr(same.layers[index].mlp.experts, name).weight)
            assert not torch.equal(found, getattr(other.layers[index].mlp.experts, name).weight)


def test_formats_without_experts_are_refused() -> None:
    model = make_model()
    with pytest.raises(ModelError, match="can't be quantised: its experts"):
        build_low_bit_model(model.config, torch.bfloat16)
    with pytest.raises(ModelError, match="its 24 columns of an expert are not a multiple of 16"):
        build_model(model.config, torch.float32, "meta", parallel=TensorParallel(0, 2))
    with pytest.raises(
        ModelError, match="Qwen3MoeForCausalLM can't be a Megatron-Core GPTModel: options .* num_experts="
    ):
        transformer_config_values(model.config)
