"""GGUF files of every family give the logits of transformers on the folder that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from engine import Engine, EngineConfig
from engine.checkpoint.gguf_families import FAMILIES
from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.gguf_model import GGUFModel
from engine.errors import ModelError
from engine.loader.cpu_formats import gguf_config, load_gguf
from engine.models.registry import config_from_folder
from tests.support.families import VARIANTS, load_reference, tiny_folder
from tests.support.gguf_folders import write_gguf_of
from tests.support.parity import check_against

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
NO_WINDOW: dict[str, Any] = {"use_sliding_window": False, "layer_types": None}
TIED = {"tie_word_embeddings": True}
# What files don't say is what llama.cpp assumes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2": ("qwen2", NO_WINDOW),
    "qwen3": ("qwen3", NO_WINDOW),
    "qwen2_moe": ("qwen2_moe", NO_WINDOW | {"mlp_only_layers": []}),
    "qwen3_moe": ("qwen3_moe", NO_WINDOW | {"mlp_only_layers": [], "norm_topk_prob": True}),
    "olmoe": ("olmoe", {}),
    "gpt_oss": ("gpt_oss", {"swiglu_limit": 7.0}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-groups": ("glm4_moe-groups", {}),
    "granite": ("granite-biases-tied", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoeshared": ("granitemoeshared", {}),
    "smollm3": ("smollm3", {}),
    "gemma": ("gemma", TIED),
    "gemma2": ("gemma2", TIED | {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3-softcap",
        TIED | {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    ),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "phi3-long": ("phi3-long-partial", {}),
    "olmo": ("olmo-clip", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3-listed", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "starcoder2-no-biases": ("starcoder2-no-biases", {"hidden_act": "gelu_pytorch_tanh"}),
    "stablelm": ("stablelm-biases", {}),
    "nemotron": ("nemotron-biases", {}),
    "seed_oss": ("seed_oss", {}),
    "cohere": ("cohere-qk-norms", TIED),
    "cohere2": ("cohere2", TIED),
    "exaone4": ("exaone4", {"rope_parameters": LLAMA3}),
    "exaone4-no-windows": ("exaone4-no-windows", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "gpt_neox": ("gpt_neox", {}),
}  # fmt: skip


def write(name: str, folder: Path, **options: Any) -> Path:
    """Write a folder and a file of a case; return the path of the file."""
    family, changes = CASES[name]
    write_gguf_of(tiny_folder(family, folder / "hf", **changes), folder / "m.gguf", **options)
    return folder / "m.gguf"


def test_every_family_has_a_case() -> None:
    found = {VARIANTS.get(family, (family, {}))[0] for family, _ in CASES.values()}
    assert found - {"mistral"} == {family.model_type for family in FAMILIES}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_on_the_folder(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    _, model = load_gguf(str(path), cpu_weight_format="fp32")
    with torch.inference_mode():
        check_against(load_reference(tmp_path / "hf"), model)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "granitemoeshared", "phi3", "gpt_neox"])
def test_quantised_tensors_are_dequantised_before_they_are_arranged(name: str, tmp_path: Path) -> None:
    exact = GGUFModel(GGUFFile(write(name, tmp_path)))
    write_gguf_of(tmp_path / "hf", tmp_path / "q.gguf", Kind.Q8_0)
    for found, weight in GGUFModel(GGUFFile(tmp_path / "q.gguf")).weights():
        wanted = exact.weight(found)
        assert (weight - wanted).abs().max() <= wanted.abs().max() / 127, found


def test_short_and_long_contexts_have_factors(tmp_path: Path) -> None:
    path, folder = tmp_path / "m.gguf", tiny_folder("phi3-short", tmp_path / "hf")
    write_gguf_of(folder, path)
    found, wanted = (read.rope_scaling for read in (gguf_config(str(path))[0], config_from_folder(folder)))
    assert found is not None and wanted is not None
    assert (found.short_factor, found.long_factor) == (wanted.short_factor, wanted.long_factor)
    assert found.attention_factor == pytest.approx(wanted.attention_factor)
    assert [found.is_long(length) for length in (2048, 2049)] == [False, True]


def test_an_engine_serves_experts_from_a_file(tmp_path: Path) -> None:
    path = write("qwen3_moe", tmp_path)
    prompt = list(range(3, 40))
    wanted = load_reference(tmp_path / "hf").generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    with Engine(EngineConfig(model=str(path), dtype="float32", max_num_seqs=2, max_model_len=64)) as engine:
        found = engine.generate(
            prompt_token_ids=[prompt], sampling_params={"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        )
    assert list(found[0].token_ids) == wanted[0, len(prompt) :].tolist()


def rewrite(path: Path, changes: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a file again with other settings, and further tensors."""
    file = GGUFFile(path)
    name = file.metadata["general.architecture"]
    writer = gguf.GGUFWriter(path.with_suffix(".changed.gguf"), name)
    values = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    for key, value in (values | changes).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{name}.{key}", value)
    for tensor in file.tensors:
        writer.add_tensor(tensor, file.dense(tensor).numpy())
    for tensor, value in (tensors or {}).items():
        writer.add_tensor(tensor, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".changed.gguf")


def test_layers_for_drafts_are_left_out(tmp_path: Path) -> None:
    path = write("glm4_moe", tmp_path)
    plain = gguf_config(str(path))[0]
    more = {"blk.4.nextn.eh_proj.weight": torch.ones(64, 128), "blk.4.attn_norm.weight": torch.ones(64)}
    changed = rewrite(path, {"block_count": 5, "nextn_predict_layers": 1}, more)
    assert gguf_config(str(changed))[0] == plain
    load_gguf(str(changed), cpu_weight_format="fp32")
    with pytest.raises(ModelError, match="leave 0 layers"):
        gguf_config(str(rewrite(path, {"block_count": 1, "nextn_predict_layers": 1})))


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("glm4_moe", {"expert_gating_func": 1}, r"glm4moe\.expert_gating_func is 1; it must be 2"),
    ("granite", {"rope.scaling.finetuned": False}, r"granite\.rope\.scaling\.finetuned is False"),
    ("gemma3", {"attention.sliding_window_pattern": "all"}, r"sliding_window_pattern is 'all'; it must be an int"),
    ("gemma3", {"attention.sliding_window_pattern": [True, False]}, r"a list of 7 bools"),
    ("gemma2", {"attention.sliding_window": -1.0}, r"attention\.sliding_window is -1\.0; it must be an int"),
    ("olmo3", {"rope.freq_base_swa": 1e6}, r"olmo2\.rope\.freq_base_swa is 1000000\.0; it must be"),
    ("stablelm", {"use_parallel_residual": 1}, r"use_parallel_residual is 1; it must be a bool"),
    ("glm4", {"rope.dimension_count": 7}, r"rope\.dimension_count\) of 7"),
    ("glm4", {"rope.dimension_sections": [8, 12, 12, 0]}, r"glm4\.rope\.dimension_sections is a list"),
    ("qwen3_moe", {"expert_used_count": 9}, "num_experts_per_tok"),
    ("mixtral", {"expert_count": 4}, "tensors and metadata disagree"),
    ("mixtral", {"expert_weights_scale": 2.5}, r"llama\.expert_weights_scale is 2\.5"),
    ("phi3", {"rope.scaling.type": "longrope"}, "longrope"),
])  # fmt: skip
def test_settings_that_no_model_computes_are_refused_by_name(
    name: str, changes: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        gguf_config(str(rewrite(write(name, tmp_path), changes)))


def test_a_window_pattern_may_be_a_number_or_a_list(tmp_path: Path) -> None:
    path = write("gemma3", tmp_path)
    for pattern, full in ((3, [2, 5]), (0, []), (1, list(range(7))), ([index != 4 for index in range(7)], [4])):
        windows = gguf_config(str(rewrite(path, {"attention.sliding_window_pattern": pattern})))[0].windows
        assert [index for index in range(7) if not windows or windows[index] is None] == full
