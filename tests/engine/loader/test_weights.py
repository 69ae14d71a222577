"""Loading and updating weights: every tensor exactly once, all or nothing, in place, without a second copy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError, WeightUpdateError
from engine.loader.weights import (
    iterate_safetensors,
    load_dummy,
    load_hf_folder,
    load_weights,
    safetensors_files,
    stage_update,
)
from engine.models import Decoder, build_model, config_from_dict

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
Q, K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
UP, NORM, EMBED = "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"


def make_model(seed: int = 0, **changes: Any) -> Decoder:
    model = build_model(config_from_dict({**CONFIG, **changes}), torch.float32, "cpu")
    load_dummy(model, seed)
    return model


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_weights()}


def write_folder(folder: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(weights, folder / "model.safetensors")
    return folder


def same(model: Decoder, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, weights[name]) for name, tensor in model.named_weights())


def test_a_folder_loads_bit_for_bit_into_fused_storage(tmp_path: Path) -> None:
    weights = weights_of(make_model(seed=5))
    _, model = load_hf_folder(write_folder(tmp_path, weights), torch.float32, "cpu")
    assert same(model, weights)
    fused = torch.cat((weights[Q], weights[K], weights[V]))
    assert torch.equal(model.layers[1].attn.qkv.weight, fused)


def test_shards_are_read_by_the_index(tmp_path: Path) -> None:
    weights = weights_of(make_model(seed=6))
    names = sorted(weights)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    save_file({"stray": torch.zeros(1)}, tmp_path / "consolidated.safetensors")  # not in the index, so not read
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    assert same(model, weights)


def test_loading_converts_to_the_models_dtype(tmp_path: Path) -> None:
    weights = weights_of(make_model())
    _, model = load_hf_folder(write_folder(tmp_path, weights), torch.bfloat16, "cpu")
    assert same(model, {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_all_mismatches_are_reported_together(tmp_path: Path) -> None:
    weights = weights_of(make_model())
    del weights[K], weights[NORM]
    weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(48, 32)
    weights[UP] = torch.zeros(32, 48)
    weights[Q] = torch.zeros(64, 32, dtype=torch.int8)
    with pytest.raises(ModelError) as caught:
        load_hf_folder(write_folder(tmp_path, weights), torch.float32, "cpu")
    message = str(caught.value)
    assert str(tmp_path) in message and "Qwen3ForCausalLM" in message
    for part in (
        f"{K} is missing",
        f"{NORM} is missing",
        "model.layers.9.mlp.up_proj.weight is unexpected",
        f"{UP} has shape [32, 48], expected [48, 32]",
        f"{Q} has dtype torch.int8",
    ):
        assert part in message
    assert f"{Q} is missing" not in message


def test_a_repeated_tensor_is_rejected() -> None:
    model = make_model()
    weights = weights_of(model)
    with pytest.raises(ModelError, match="model.norm.weight appears twice"):
        load_weights(model, [*weights.items(), (NORM, weights[NORM])], "shards")


def test_a_long_list_of_problems_is_truncated_with_a_count() -> None:
    model = make_model()
    with pytest.raises(ModelError, match=r"; and \d+ more$"):
        load_weights(model, [], "nothing")


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    weights = weights_of(make_model())
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    _, model = load_hf_folder(write_folder(tmp_path, weights), torch.float32, "cpu")
    assert torch.equal(model.norm.weight, weights[NORM])


def test_a_tied_models_own_head_must_equal_the_embedding(tmp_path: Path) -> None:
    weights = weights_of(make_model(tie_word_embeddings=True))
    weights["lm_head.weight"] = weights[EMBED].clone()
    _, model = load_hf_folder(write_folder(tmp_path, weights, tie_word_embeddings=True), torch.bfloat16, "cpu")
    assert torch.equal(model.lm_head.weight, weights[EMBED].bfloat16())
    weights["lm_head.weight"][3, 3] += 1
    write_folder(tmp_path, weights, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load_hf_folder(tmp_path, torch.float32, "cpu")


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 200)


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _index(weight_map: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "model.safetensors is not a readable safetensors file"),
        (_garbage, "model.safetensors is not a readable safetensors file"),
        (_empty, "model.safetensors is not a readable safetensors file"),
        (_no_weights, r"has no \*\.safetensors; was the download complete"),
        (_pickles, "convert pytorch_model.bin to safetensors"),
        (_index({NORM: "lost.safetensors"}), "lacks lost.safetensors"),
        (_index({NORM: "../elsewhere.safetensors"}), "names files outside its folder"),
        (_index([1, 2]), "'weight_map' should map"),
        (_index({}), r"has no \*\.safetensors"),
    ],
)
def test_errors_name_the_damaged_folder(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    damage(write_folder(tmp_path, weights_of(make_model())))
    with pytest.raises(ModelError, match=message) as caught:
        load_hf_folder(tmp_path, torch.float32, "cpu")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("cut", [0, 7, 8, 9, 200, 3000, -1])
def test_a_truncated_file_raises_model_error(cut: int, tmp_path: Path) -> None:
    path = write_folder(tmp_path, weights_of(make_model())) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError):
        list(iterate_safetensors(tmp_path))


def test_loading_makes_no_second_copy(tmp_path: Path) -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")

    def own_memory() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    big = {"vocab_size": 20000, "hidden_size": 512, "num_hidden_layers": 1}
    source = make_model(**big)
    write_folder(tmp_path, weights_of(source), **big)
    size = sum(parameter.nbytes for parameter in source.parameters())
    assert size > 80e6
    model = build_model(config_from_dict({**CONFIG, **big}), torch.float32, "cpu")
    start, peak = own_memory(), 0

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal peak
        for item in iterate_safetensors(tmp_path):
            yield item
            peak = max(peak, own_memory() - start)

    load_weights(model, watched(), "big")
    assert peak < 1.3 * size


def test_dummy_weights_follow_the_seed() -> None:
    one, again, other = (weights_of(make_model(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one[UP], other[UP])
    assert torch.equal(one[NORM], torch.ones(32))
    assert 0.018 < float(one[EMBED].std()) < 0.022


def test_an_update_writes_in_place() -> None:
    model, new = make_model(seed=1), weights_of(make_model(seed=2))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    weight = model.layers[0].attn.qkv.weight
    assert stage_update(model.weight_slots(), iter(new.items())) == len(new)
    assert same(model, new)
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    assert model.layers[0].attn.qkv.weight is weight


def test_an_update_may_be_partial_and_of_another_dtype() -> None:
    model = make_model()
    before = weights_of(model)
    stage_update(model.weight_slots(), [(K, torch.full((32, 32), 1.5, dtype=torch.bfloat16))])
    after = weights_of(model)
    assert torch.equal(after[K], torch.full((32, 32), 1.5))
    assert all(torch.equal(after[name], before[name]) for name in before if name != K)
    with pytest.raises(WeightUpdateError, match=f"{Q} is missing"):
        stage_update(model.weight_slots(), [(K, before[K])], complete=True)


BAD_UPDATES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], list[Any]], str]] = {
    "shape": (lambda new: [*new.items(), (Q, torch.zeros(3))], "has shape"),
    "unknown": (lambda new: [*new.items(), ("model.norm.wieght", torch.zeros(32))], "did you mean 'model.norm.weight'"),
    "dtype": (lambda new: [*list(new.items())[:-1], (list(new)[-1], list(new.values())[-1].long())], "has dtype"),
    "meta": (lambda new: [*list(new.items())[1:], (EMBED, torch.empty(64, 32, device="meta"))], "no dense data"),
    "twice": (lambda new: [*new.items(), (NORM, new[NORM])], "appears twice"),
    "nan": (lambda new: [*list(new.items())[1:], (EMBED, torch.full((64, 32), float("nan")))], "NaN or infinity"),
    "not a pair": (lambda new: [*new.items(), "model.norm.weight"], "is str, expected a .name"),
    "not a tensor": (
        lambda new: [*new.items(), ("model.norm.weight", [1.0] * 32)],
        "is tuple, expected a .name",
    ),
    "empty": (lambda new: [], "no tensors"),
}


@pytest.mark.parametrize("kind", BAD_UPDATES)
def test_a_bad_update_writes_nothing(kind: str) -> None:
    model = make_model(seed=1)
    before = weights_of(model)
    make, message = BAD_UPDATES[kind]
    with pytest.raises(WeightUpdateError, match=message):
        stage_update(model.weight_slots(), make(weights_of(make_model(seed=2))), check_finite=True)
    assert same(model, before)


def test_update_problems_are_reported_together() -> None:
    model = make_model()
    with pytest.raises(WeightUpdateError) as caught:
        stage_update(model.weight_slots(), [(Q, torch.zeros(1)), ("x", torch.zeros(1)), (NORM, torch.zeros(32).int())])
    for part in (f"{Q} has shape [1]", "x is unexpected", f"{NORM} has dtype torch.int32", "old weights still serve"):
        assert part in str(caught.value)


def test_a_source_that_fails_midway_leaves_the_old_weights() -> None:
    model, new = make_model(seed=1), weights_of(make_model(seed=2))
    before = weights_of(model)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(new.items())[:-1]
        raise ConnectionError("the trainer went away")

    with pytest.raises(ConnectionError):
        stage_update(model.weight_slots(), broken())
    assert same(model, before)


def test_a_tied_update_requires_a_head_equal_to_the_embedding() -> None:
    model = make_model(tie_word_embeddings=True)
    table = torch.randn(64, 32)
    stage_update(model.weight_slots(), [("lm_head.weight", table), (EMBED, table)])
    assert torch.equal(model.lm_head.weight, table) and model.lm_head.weight is model.embedding.weight
    with pytest.raises(WeightUpdateError, match="differs from model.embed_tokens.weight"):
        stage_update(model.weight_slots(), [("lm_head.weight", table + 1)])
    assert torch.equal(model.embedding.weight, table)


def test_a_single_file_is_found_without_an_index(tmp_path: Path) -> None:
    write_folder(tmp_path, weights_of(make_model()))
    assert safetensors_files(tmp_path) == [tmp_path / "model.safetensors"]
    assert set(dict(iterate_safetensors(tmp_path))) == set(load_file(tmp_path / "model.safetensors"))
