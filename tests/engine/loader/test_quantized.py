"""Quantised checkpoints: recognised, refused by name, loaded, updated, and served with the tokens of transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, SamplingParams
from engine.checkpoint.quantization import KEY, read_quantization
from engine.errors import ConfigError, ModelError, WeightUpdateError
from engine.layers.formats.slots import plain_slots
from engine.layers.weight_method import PLAIN
from engine.loader.weights import check_update, load_hf_folder, stage_update, write_update
from engine.models.registry import config_from_folder
from tests.engine.lively import PROMPTS, Reference, write_lively_model
from tests.support import toy_models
from tests.support.engines import engines, greedy_tokens
from tests.support.quantized import FORMATS, compressed, integers, quantize_folder
from tests.support.qwen3_moe import write_lively_moe

MODELS = {
    "dense": write_lively_model,
    "moe": lambda tiny, folder, seed: write_lively_moe(tiny, folder, moe_intermediate_size=32, intermediate_size=96),
}
MOE_FORMATS = ("fp8-block", "fp8-tensor", "ct-int4-zeros", "awq", "gptq-desc-act", "ct-mxfp4")
# one of each storage and arithmetic; the rest differ in how tensors are unpacked, which test_formats.py covers
SERVED = ("fp8-block", "fp8-tensor", "ct-w8a16-group", "ct-int4-group", "awq", "gptq", "gptq-desc-act", "mxfp4")

INT8 = compressed("int-quantized", integers(8, 0))
Q = "model.layers.0.self_attn.q_proj"


class Folders:
    """Folders of models, made when they are first asked for: `quantized(…)`, and `plain(…)` with equal weights."""

    def __init__(self, tiny: Path, root: Path):
        self._tiny, self._root = tiny, root
        self._references: dict[str, Reference] = {}

    def _make(self, name: str, model: str) -> Path:
        folder = self._root / f"{model}-{name}"
        if not folder.exists():
            source = self._root / model
            if not source.exists():
                MODELS[model](self._tiny, source, 0)
            quantize_folder(source, folder / "quantized", folder / "plain", name)
        return folder

    def quantized(self, name: str, model: str = "dense") -> Path:
        return self._make(name, model) / "quantized"

    def plain(self, name: str, model: str = "dense") -> Path:
        return self._make(name, model) / "plain"

    def reference(self, name: str, model: str = "dense") -> Reference:
        key = f"{model}-{name}"
        if key not in self._references:
            self._references[key] = Reference(self.plain(name, model))
        return self._references[key]


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tiny_model, tmp_path_factory.mktemp("quantized"))


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    with engines() as make_one:
        yield make_one


def check_tokens_and_logprobs(engine: Engine, reference: Reference, count: int = 12) -> None:
    """Compare greedy tokens, and the log-probabilities of a prompt, with transformers in float32."""
    wanted = [reference.greedy(prompt, count) for prompt in PROMPTS]
    assert greedy_tokens(engine, PROMPTS, count) == wanted
    assert len({token for tokens in wanted for token in tokens}) > 5
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    [output] = engine.generate(prompt_token_ids=[PROMPTS[2]], sampling_params=params)
    found = [entry.logprob for entry in output.prompt_logprobs[1:]]
    logprobs = reference.logprobs(PROMPTS[2])
    expected = [float(logprobs[place, token]) for place, token in enumerate(PROMPTS[2][1:])]
    assert found == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("scope", ["none", "block"])
@pytest.mark.parametrize("name", SERVED)
def test_served_tokens_are_those_of_the_dequantised_weights(folders, make, name, scope):
    engine = make(model=str(folders.quantized(name)), inference_cuda_graph_scope=scope)
    check_tokens_and_logprobs(engine, folders.reference(name))
    if scope == "block":
        replays = dict(engine.stats().graphs["replays"])
        assert any(labels[2] == "decode" for labels in replays)
        assert not any(reason == "capture_failed" for (_, _, reason), _ in engine.stats().graphs["fallbacks"])


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["layer", "block"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in SERVED])
def test_the_other_formats_are_served_too(folders, make, name, scope):
    engine = make(model=str(folders.quantized(name)), inference_cuda_graph_scope=scope)
    check_tokens_and_logprobs(engine, folders.reference(name))


@pytest.mark.parametrize("name", MOE_FORMATS)
def test_experts_are_served_quantised(folders, make, name):
    engine = make(model=str(folders.quantized(name, "moe")))
    check_tokens_and_logprobs(engine, folders.reference(name, "moe"), 6)
    assert not any(reason == "capture_failed" for (_, _, reason), _ in engine.stats().graphs["fallbacks"])


def test_two_ranks_serve_the_same_tokens(folders, make):
    """With activation order, a rank's inputs are of all groups."""
    engine = make(model=str(folders.quantized("gptq-desc-act")), tensor_parallel_size=2)
    reference = folders.reference("gptq-desc-act")
    assert greedy_tokens(engine, PROMPTS, 8) == [reference.greedy(prompt, 8) for prompt in PROMPTS]


# ---- recognition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by 'bitsandbytes' are not supported; .* fp8, "),
        ({"load_in_8bit": True}, "by 'bitsandbytes' are not"),
        ({"quant_method": "hqq"}, "by 'hqq' are not supported"),
        ({"quant_method": "aqlm"}, "by 'aqlm' .* --quantization fp8, int8 or int4"),
        ({"quant_method": "quip"}, "by 'quip'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4', supported is 'FP8' or "),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "by 'modelopt_fp4'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2', supported is 'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\], .* two whole numbers"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers='lm_head', .* a list of module names"),
        ({"quant_method": "awq", "bits": 8}, "bits=8, supported is 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv', supported is 'gemm'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point=False, supported is True"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3, supported is 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0, .* at least 1, or -1"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format=True, supported is false"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "lm_head=True"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*q_proj": {"bits": 2}}}, "q_proj'.* bits=2, supported is"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {".*q": {"rank": 8}}}, "'rank': 8.*, supported is bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, r"'re:\(' in quantization_config is no regular"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["-:.*"]}, "dynamic=.* an object of settings by module"),
        (compressed("nvfp4-pack-quantized", {}), "format='nvfp4-pack-quantized', supported is pack-"),
        (compressed("marlin-24", {}), "format='marlin-24'"),
        (compressed("pack-quantized", integers(3, 0)), r"num_bits=\('int', 3\), supported is \('int', 4\) or "),
        (compressed("pack-quantized", {"strategy": "tensor_group"}), "strategy='tensor_group'"),
        ({**INT8, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
        ({**INT8, "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**INT8, "quantization_status": "calibration"}, "quantization_status='calibration'"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "config_groups={}, .* non-empty object"),
        ("fp8", "'quantization_config' must be an object, found str"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_quantization({KEY: config}, "config.json")
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)


def test_unknown_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_quantization({KEY: {**FORMATS["awq"].config, "surprise": 1}}, "config.json")
    assert "config.json: quantization_config has keys that are not used: surprise" in caplog.text
    caplog.clear()
    for form in FORMATS.values():
        read_quantization({KEY: {**form.config, "later_option": None}}, "config.json")
    assert not caplog.text


def test_checkpoints_of_earlier_compressed_tensors_are_read():
    """Their status is "frozen", and they are stored in the same way."""
    assert read_quantization({KEY: {**INT8, "quantization_status": "frozen"}}, "config.json").element == "int8"


@pytest.mark.parametrize(("file", "name"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_settings_in_a_file_of_an_older_tool_are_found(folders, make, tmp_path, file, name):
    source = folders.quantized(name)
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    values = json.loads((source / "config.json").read_text())
    settings = values.pop(KEY)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / file).write_text(json.dumps({key: value for key, value in settings.items() if key != "quant_method"}))
    engine = make(model=str(tmp_path))
    assert greedy_tokens(engine, PROMPTS, 4) == [folders.reference(name).greedy(prompt, 4) for prompt in PROMPTS]


def test_the_most_specific_target_of_a_group_counts():
    def group(group_size: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": integers(4, group_size)}

    groups = {"a": group(16, "Linear"), "b": group(32, "re:.*down_proj$"), "c": group(64, "layers.1.mlp.down_proj")}
    found = read_quantization({KEY: {**compressed("pack-quantized", {}), "config_groups": groups}}, "config.json")
    assert found is not None
    sizes = {name: found.scheme(name).block[1] for name in ("layers.1.mlp.down_proj", "layers.0.mlp.down_proj", "x.q")}
    assert list(sizes.values()) == [64, 32, 16]


def test_modelopts_own_file_is_found(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    found = config_from_folder(tmp_path).quantization
    assert found is not None and found.method == "modelopt" and found.ignored == ("lm_head",)


@pytest.mark.parametrize("ignored", [["model.layers.0"], ["self_attn"], [r"re:model\.layers\.0\..*"], []])
def test_a_layer_is_quantised_if_its_tensors_are(folders, tmp_path, ignored):
    """The files decide, whatever the list of ignored modules means to the program that wrote it."""
    source, values = folders.quantized("fp8-block"), load_file(folders.plain("fp8-block") / "model.safetensors")
    tensors = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if not name.startswith("model.layers.0.self_attn")
    }
    tensors |= {name: values[name] for name in values if name.startswith("model.layers.0.self_attn")}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config[KEY]["modules_to_not_convert"] = ignored
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    assert model.layers[0].attn.qkv.method is PLAIN and model.layers[1].attn.qkv.method is not PLAIN
    found = plain_slots(model.weight_slots())["model.layers.0.mlp.up_proj.weight"].read()
    assert torch.equal(found, values["model.layers.0.mlp.up_proj.weight"])


def test_gptqs_dynamic_settings_apply_to_the_modules_that_they_match(folders, tmp_path):
    tensors: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, is_own in (("gptq", False), ("gptq-8bit", True)):
        for found, folder in ((tensors, folders.quantized(name)), (wanted, folders.plain(name))):
            found |= {key: one for key, one in tensors_of(folder).items() if (".down_proj." in key) == is_own}
    plain = {key: one for key, one in wanted.items() if "layers.1.self_attn" in key}
    tensors = {key: one for key, one in tensors.items() if "layers.1.self_attn" not in key} | plain
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folders.quantized("gptq") / "config.json").read_text())
    config[KEY]["dynamic"] = {
        r"-:model\.layers\.1\.self_attn.*": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 16, "desc_act": False, "sym": False},
        r".*\.layers\..*": {"bits": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    slots = plain_slots(model.weight_slots())
    assert slots and all(torch.equal(slot.read(), wanted[key]) for key, slot in slots.items())
    assert {key.split(".")[3] for key in slots if ".1." in key} == {"mlp"}


def test_parts_of_a_fused_layer_that_are_stored_differently_are_refused(folders, tmp_path):
    source, values = folders.quantized("awq"), load_file(folders.plain("awq") / "model.safetensors")
    tensors = {name: one for name, one in load_file(source / "model.safetensors").items() if not name.startswith(Q)}
    save_file({**tensors, f"{Q}.weight": values[f"{Q}.weight"]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(
        ModelError, match=r"layers.0.self_attn computes q_proj and k_proj .* \(q_proj plain, k_proj int4"
    ):
        load_hf_folder(tmp_path, torch.float32, "cpu")


# ---- broken checkpoints --------------------------------------------------------------------------------------------


def nan_in(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("name", "last", "change", "message"),
    [
        ("fp8-block", "weight_scale_inv", lambda t: t[:1], r"has shape \[1, 2\], expected \[2, 2\]"),
        ("fp8-block", "weight_scale_inv", None, "is missing"),
        ("fp8-block", "weight_scale_inv", nan_in, "contains NaN or infinity"),
        ("fp8-block", "weight", lambda t: t.float(), "has dtype torch.float32, expected torch.float8_e4m3fn"),
        ("fp8-block", "weight", nan_in, "contains NaN"),
        ("fp8-tensor", "weight_scale", lambda t: t.repeat(2), r"has shape \[2\], expected \[1\] or \[\] or"),
        ("fp8-tensor", "input_scale", lambda t: t / 0, "contains NaN or infinity"),
        ("ct-int4-group", "weight_packed", lambda t: t[:, :-1].contiguous(), "has shape"),
        ("ct-int4-group", "weight_shape", lambda t: t * 2, r"says \[128, 128\], expected \[64, 64\]"),
        ("ct-int4-zeros", "weight_zero_point", None, "is missing"),
        ("ct-int4-g-idx", "weight_g_idx", lambda t: t + 1, "has groups 1 to 4, expected 0 to 3"),
        ("awq", "scales", lambda t: t.T.contiguous()[:8], "has shape"),
        ("awq", "qzeros", None, "is missing"),
        ("gptq-desc-act", "g_idx", lambda t: t - 1, "has groups -1 to 2, expected 0 to 3"),
        ("gptq-desc-act", "g_idx", None, "is missing"),
        ("gptq", "g_idx", lambda t: t.flip(0), "is not in order, but quantization_config has no desc_act"),
        ("gptq", "bias", lambda t: t + 1, "is a bias that is not zero"),
        ("ct-mxfp4", "weight_scale", lambda t: t.fill_(255), r"contains NaN \(255\)"),
    ],
)
def test_a_broken_checkpoint_is_refused_by_tensor(folders, tmp_path, name, last, change, message):
    source = folders.quantized(name)
    tensors = load_file(source / "model.safetensors")
    tensor = tensors.pop(f"{Q}.{last}")
    if change is not None:
        tensors[f"{Q}.{last}"] = change(tensor)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ModelError, match=rf"{Q}\.{last} {message}"):
        load_hf_folder(tmp_path, torch.float32, "cpu")


def test_scales_of_a_quantised_kv_cache_are_left_out(folders, tmp_path):
    source = folders.quantized("ct-fp8-tensor")
    tensors = load_file(source / "model.safetensors")
    for last in ("k_scale", "v_scale", "k_proj.output_scale"):
        tensors[f"model.layers.0.self_attn.{last}"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    load_hf_folder(tmp_path, torch.float32, "cpu")


# ---- updates -------------------------------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def addresses(engine: Engine) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in engine.loop.executor.worker.runner.model.named_buffers()}


def other_tensors(folders: Folders, name: str, root: Path) -> tuple[dict[str, torch.Tensor], Reference]:
    """Return quantised tensors of other weights, and a reference for them."""
    plain = folders.quantized(name).parent.parent / "dense"
    quantize_folder(plain, root / "quantized", root / "plain", name, seed=1)
    return tensors_of(root / "quantized"), Reference(root / "plain")


@pytest.mark.parametrize("scope", ["block", "layer"])
@pytest.mark.parametrize("name", ["fp8-block", "ct-int4-zeros", "awq", "gptq-desc-act"])
def test_an_update_with_quantised_tensors_keeps_graphs(folders, make, tmp_path, name, scope):
    engine = make(model=str(folders.quantized(name)), inference_cuda_graph_scope=scope, warmup="full")
    wanted = [folders.reference(name).greedy(prompt, 8) for prompt in PROMPTS]
    assert greedy_tokens(engine, PROMPTS, 8) == wanted
    captures, places = dict(engine.stats().graphs["captures"]), addresses(engine)
    update, reference = other_tensors(folders, name, tmp_path)
    engine.update_weights(update.items(), version="second")
    assert greedy_tokens(engine, PROMPTS, 8) == [reference.greedy(prompt, 8) for prompt in PROMPTS] != wanted
    assert dict(engine.stats().graphs["captures"]) == captures and addresses(engine) == places
    assert not engine.stats().graphs["invalidations"]


@pytest.mark.parametrize("name", ["fp8-block", "ct-int4-zeros", "awq", "gptq-desc-act", "online"])
def test_an_update_with_plain_tensors_is_quantised_in_place(folders, make, tmp_path, name, tiny_model):
    """The rollout of a trainer with plain weights gives the tokens of those weights, rounded as the format rounds."""
    write_lively_model(tiny_model, tmp_path / "trainer", seed=3)
    update = tensors_of(tmp_path / "trainer")
    settings = {"quantization": "fp8"} if name == "online" else {}
    source = folders.plain("awq") if name == "online" else folders.quantized(name)
    engine = make(model=str(source), warmup="full", **settings)
    before = greedy_tokens(engine, PROMPTS, 8)
    captures, places = dict(engine.stats().graphs["captures"]), addresses(engine)
    assert engine.update_weights(update.items(), version="second") == len(update)
    found = greedy_tokens(engine, PROMPTS, 8)
    assert dict(engine.stats().graphs["captures"]) == captures and addresses(engine) == places
    # the same update again, and a reference with the weights that the engine says it uses
    slots = engine.loop.executor.worker.runner.model.weight_slots()
    plain = dict(slots) | plain_slots(slots)
    used = {key: plain[key].read().float() for key in update}
    assert not torch.equal(used[f"{Q}.weight"], update[f"{Q}.weight"])
    for key in update:
        assert (used[key] - update[key]).norm() < 0.15 * update[key].norm(), key
    for path in (tmp_path / "trainer").iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(
        {key: value.contiguous() for key, value in used.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    reference = Reference(tmp_path)
    assert found == [reference.greedy(prompt, 8) for prompt in PROMPTS] != before


def test_exported_tensors_are_an_update(folders, make):
    engine = make(model=str(folders.quantized("gptq-desc-act")))
    before = greedy_tokens(engine, PROMPTS, 6)
    weights = [(name, tensor.clone()) for name, tensor in engine.loop.executor.worker.runner.model.named_weights()]
    engine.update_weights(weights, version="same")
    assert greedy_tokens(engine, PROMPTS, 6) == before


@pytest.mark.parametrize(
    ("name", "sent", "message"),
    [
        ("fp8-block", ["weight"], "q_proj.weight_scale_inv is missing, and .*q_proj.weight is no plain weight"),
        ("fp8-block", ["weight_scale_inv"], "q_proj.weight is missing"),
        ("awq", ["qweight", "scales"], "q_proj.qzeros is missing"),
        ("awq", ["plain", "scales"], "q_proj.weight is a plain weight, but .*q_proj.scales of its quantised form came"),
        ("fp8-block", ["plain", "weight_scale_inv"], "is a plain weight, but .*weight_scale_inv"),
    ],
)
def test_part_of_a_quantised_matrix_is_no_update(folders, name, sent, message):
    _, model = load_hf_folder(folders.quantized(name), torch.float32, "cpu")
    tensors = tensors_of(folders.quantized(name))
    plain = tensors_of(folders.plain(name))[f"{Q}.weight"]
    update = [(f"{Q}.weight", plain) if last == "plain" else (f"{Q}.{last}", tensors[f"{Q}.{last}"]) for last in sent]
    with pytest.raises(WeightUpdateError, match=message):
        stage_update(model.weight_slots(), update)


def test_a_complete_update_may_be_plain_or_quantised(folders):
    _, model = load_hf_folder(folders.quantized("awq"), torch.float32, "cpu")
    plain, quantised = tensors_of(folders.plain("awq")), tensors_of(folders.quantized("awq"))
    for update in (plain, quantised):
        slots = model.weight_slots()
        write_update(slots, check_update(slots, update.items(), complete=True))
    with pytest.raises(WeightUpdateError, match=rf"{Q}.qweight is missing"):
        rest = {name: tensor for name, tensor in plain.items() if name != f"{Q}.weight"}
        check_update(model.weight_slots(), rest.items(), complete=True)


# ---- quantised while loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("element", "bound"), [("fp8", 0.03), ("int8", 0.01), ("int4", 0.12)])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_plain_checkpoint_is_quantised_while_it_loads(folders, make, element, bound, model):
    source = folders.plain("fp8-block", model)
    engine = make(model=str(source), quantization=element)
    loaded = engine.loop.executor.worker.runner.model
    matrices = [module for module in loaded.modules() if hasattr(module, "codes")]
    assert len(matrices) == {"dense": 8, "moe": 12}[model]
    plain = {name: slot.read().float() for name, slot in loaded.weight_slots().items()}
    for name, tensor in tensors_of(source).items():
        if name.endswith("_proj.weight"):
            error = (plain[name] - tensor).norm() / tensor.norm()
            assert 0 < error < bound, name
        elif name in plain:
            assert torch.equal(plain[name], tensor.float())
    greedy_tokens(engine, PROMPTS, 4)


def test_the_alias_and_both_settings(folders, make):
    source = str(folders.plain("fp8-block"))
    with pytest.raises(ConfigError, match="quantization='fp8' and cpu_weight_format='int4' both choose"):
        make(model=source, quantization="fp8", cpu_weight_format="int4")
    with pytest.raises(ConfigError, match="quantization='awq' is not one of fp8, int8, int4; a quantised checkpoint"):
        make(model=source, quantization="awq")
    prompts = PROMPTS[:2]
    alias = make(model=source, dtype="bfloat16", cpu_weight_format="int4")
    named = make(model=source, dtype="bfloat16", quantization="int4")
    assert greedy_tokens(alias, prompts, 6) == greedy_tokens(named, prompts, 6)


def test_a_quantised_checkpoint_is_not_quantised_again(folders, make):
    source = str(folders.quantized("awq"))
    with pytest.raises(ConfigError, match=r"quantization='fp8': .* is quantised already \(awq, int4\); leave it out"):
        make(model=source, quantization="fp8")
    make(model=source, quantization="int4")


def test_the_log_says_what_is_stored_and_computed(folders, make, caplog):
    with caplog.at_level(logging.INFO):
        make(model=str(folders.quantized("awq")))
    assert "weights quantised by awq stay int4 in memory; each step dequantises them" in caplog.text


def test_dummy_weights_are_quantised(folders, make):
    engine = make(model=str(folders.quantized("gptq")), load_format="dummy")
    assert all(len(tokens) == 4 for tokens in greedy_tokens(engine, PROMPTS, 4))


def test_a_family_without_linear_layers_of_the_engine_is_not_quantised_silently(tmp_path, make, monkeypatch):
    monkeypatch.setattr("engine.models.registry.installed_entries", lambda: (toy_models.ENTRY,))
    toy_models.write_toy(tmp_path, ["attention"])
    with pytest.raises(ModelError, match="can't be quantised: its class stores plain weights only"):
        make(model=str(tmp_path), quantization="fp8")
