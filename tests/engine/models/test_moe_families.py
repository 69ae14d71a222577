"""Families with experts: names and layouts of checkpoints, updates, refusals, two ranks, and MXFP4 folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.mxfp4 import dequantise
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.loader.weights import load_hf_folder, load_weights, stage_update
from engine.models import Decoder, build_model, config_from_dict
from tests.engine.models.test_tensor_parallel import holds_its_parts
from tests.support.attention import backend_for, prefill_metadata
from tests.support.families import WITH_EXPERTS, config_of, load_reference, tiny_folder
from tests.support.gloo_ranks import run_ranks
from tests.support.parity import make_cache, pages_per_group


def values_of(family: str, **changes: Any) -> dict[str, Any]:
    """Return the content of a family's config.json."""
    return config_of(family, **changes).to_dict() | {"architectures": None}


# ---- weights -------------------------------------------------------------------------------------------------------


def exported(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_weights()}


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_names_of_the_checkpoint_and_of_modules_load_and_round_trip(
    family: str, original: bool, tmp_path: Path
) -> None:
    """`original`: the names of published checkpoints, which exports have too; else those of transformers' modules."""
    published = tiny_folder(family, tmp_path / "published")
    load_reference(published).save_pretrained(tmp_path, save_original_format=original)
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    weights, wanted = exported(model), load_file(published / "model.safetensors")
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
    # an update with the tensors of the file, changed, is in place and complete
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    update = {name: tensor * -0.5 for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    stage_update(model.weight_slots(), model.split_stacked(update.items()), complete=True)
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    assert all(torch.equal(tensor, wanted[name] * -0.5) for name, tensor in model.named_weights())


def test_experts_that_are_missing_or_misshapen_are_named_as_in_the_checkpoint() -> None:
    model = build_model(config_from_dict(values_of("mixtral")), torch.float32, "cpu")
    weights = exported(model)
    prefix = "model.layers.1.block_sparse_moe.experts"
    del weights[f"{prefix}.7.w3.weight"]
    weights[f"{prefix}.0.w2.weight"] = torch.zeros(96, 64)
    weights["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(3, 192, 64)
    with pytest.raises(ModelError) as caught:
        load_weights(model, weights.items(), "the checkpoint")
    for part in (
        f"{prefix}.7.w3.weight is missing",
        f"{prefix}.0.w2.weight has shape [96, 64], expected [64, 96]",
        "model.layers.0.block_sparse_moe.experts.gate_up_proj is unexpected",
    ):
        assert part in str(caught.value)


def test_layers_for_drafts_after_the_last_layer_are_not_loaded() -> None:
    model = build_model(config_from_dict(values_of("glm4_moe", num_mtp_layers=2)), torch.float32, "cpu")
    weights = exported(model)
    extra = {f"model.layers.{index}.eh_proj.weight": torch.zeros(3) for index in (4, 5)}
    load_weights(model, (weights | extra).items(), "the checkpoint")
    with pytest.raises(ModelError, match="model.layers.6.eh_proj.weight is unexpected"):
        load_weights(model, (weights | {"model.layers.6.eh_proj.weight": torch.zeros(3)}).items(), "the checkpoint")


# ---- config.json ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
        ("mixtral", {"num_experts_per_tok": 9}, "'num_experts_per_tok' must be a whole number from 1 to 8, found 9"),
        ("mixtral", {"intermediate_size": 20}, "'intermediate_size' must be a multiple of 8, found 20"),
        ("mixtral", {"num_local_experts": 2000}, "'num_local_experts' must be a whole number from 1 to 1024"),
        ("mixtral", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quant"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "'shared_expert_intermediate_size' must be a whole"),
        ("olmoe", {"clip_qkv": -1}, "'clip_qkv' must be a number above 0, found -1"),
        ("glm4_moe", {"n_group": 3}, "'n_group' must be a divisor of the 8 experts, with at least 2 in each group"),
        ("glm4_moe", {"n_group": 4, "topk_group": 1}, "'topk_group' must be enough groups for 3 experts per token"),
        ("qwen2_moe", {"mlp_only_layers": "all"}, "'mlp_only_layers' must be a list of layer indices, found 'all'"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "'layer_types' must be a list of 4 times",
        ),
    ],
)
def test_unsupported_values_are_rejected_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_dict({**values_of(family), **changes})


# ---- ranks ---------------------------------------------------------------------------------------------------------


def empty_model(family: str, parallel: TensorParallel = SINGLE_RANK, **changes: Any) -> Decoder:
    values = {**values_of(family), "mlp_only_layers": [0], **changes}
    return build_model(config_from_dict(values), torch.float32, "cpu", 64, parallel)


def checkpoint(family: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Whole checkpoint tensors, large enough that every one affects the logits."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(slot.shape, generator=generator) * 0.2 + ("norm" in name)
        for name, slot in empty_model(family).weight_slots().items()
    }


@torch.inference_mode()
def logits_of(model: Decoder) -> torch.Tensor:
    tokens, positions = torch.arange(20) * 31 % model.config.vocab_size, torch.arange(20)
    cache = make_cache(model)
    metadata = prefill_metadata(cache, [(0, 20)], [[1, 2, 3]])
    metadata = metadata._replace(page_tables=pages_per_group(cache, metadata.page_tables[0]))
    return model.compute_logits(model(tokens, positions, backend_for(cache).prefill(metadata)))


def logits_of_all_families(parallel: TensorParallel) -> dict[str, torch.Tensor]:
    """Logits of each family's first weights, and after an update to its second."""
    found = {}
    for family in WITH_EXPERTS:
        model = empty_model(family, parallel)
        load_weights(model, checkpoint(family).items(), family)
        assert holds_its_parts(model, checkpoint(family))
        found[family] = logits_of(model)
        stage_update(model.weight_slots(), checkpoint(family, seed=2).items(), complete=True)
        found[f"{family} updated"] = logits_of(model)
    return found


def test_two_ranks_compute_the_logits_of_one(tmp_path: Path) -> None:
    first, second = run_ranks(logits_of_all_families, tmp_path)
    for name, wanted in logits_of_all_families(SINGLE_RANK).items():
        assert torch.equal(first[name], second[name]), name  # else ranks would sample different tokens
        assert wanted.std() > 0.1
        torch.testing.assert_close(first[name], wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"intermediate_size": 104}, "its 104 columns of an expert are not a multiple of 16. Leave"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 81}, "its 81 columns of the shared expert are not"),
        ("qwen2_moe", {"intermediate_size": 97}, "its 97 MLP columns are not a multiple of 2"),
    ],
)
def test_experts_that_cannot_be_split_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        empty_model(family, TensorParallel(0, 2), **changes)


def test_the_dense_width_of_a_model_with_experts_only_is_not_split() -> None:
    model = empty_model("qwen3_moe", TensorParallel(0, 2), mlp_only_layers=[], intermediate_size=97)
    assert model.config.moe_intermediate_size == 24


# ---- MXFP4 ---------------------------------------------------------------------------------------------------------


def test_mxfp4_experts_compute_what_their_dequantised_weights_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder as published: experts as blocks and scales, `quantization_config` in config.json."""
    generator = torch.Generator().manual_seed(4)
    reference = load_reference(tiny_folder("gpt_oss", tmp_path))
    tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors[name].shape  # transposed
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        reference.get_parameter(name).data.copy_(dequantise(blocks, scales).mT)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    values = reference.config.to_dict() | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors")
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    assert "experts are MXFP4 and are stored in 16 bits" in caplog.text
    tokens = torch.arange(20) * 31 % 320
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(model), reference(tokens[None]).logits[0], atol=1e-3, rtol=0)
    # one that lacks its scales is reported, by the names of the file and of the model
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj_blocks is unexpected.*layers.1.mlp.experts.down_proj is missing"):
        load_hf_folder(tmp_path, torch.float32, "cpu")
