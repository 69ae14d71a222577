"""Parity with transformers on the same weights: logits of prefill and of 20 decode steps, float32, CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.attention.kv_cache import KVCache
from engine.layers import HeadNorm, RMSNorm
from engine.layers.weight_method import PLAIN, PlainWeight, plain_weights
from engine.loader.weights import load_dummy, load_hf_folder
from engine.models import Decoder, build_model, config_from_dict
from engine.models.interface import ForwardContext
from tests.support.attention import decode_attention, prefill_attention

TOLERANCE = 1e-3
PAGE = 8
VOCAB = 199

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_MSCALE = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}
YARN_FACTOR = {**YARN, "attention_factor": 1.3}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}


@dataclass
class Case:
    config_class: type
    changes: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


CASES = {
    "llama": Case(transformers.LlamaConfig),
    "llama-llama3-biases": Case(
        transformers.LlamaConfig, {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-linear-tied-mqa": Case(
        transformers.LlamaConfig, {"rope_parameters": LINEAR, "tie_word_embeddings": True, "num_key_value_heads": 1}
    ),
    "mistral-wide-heads-sharded": Case(
        transformers.MistralConfig, {"head_dim": 16, "sliding_window": None}, shard="20KB"
    ),
    "mistral-window-unreached": Case(transformers.MistralConfig, {"sliding_window": 128}),
    "qwen2-yarn": Case(transformers.Qwen2Config, {"rope_parameters": YARN}),
    "qwen2-yarn-mscale-tied": Case(
        transformers.Qwen2Config, {"rope_parameters": YARN_MSCALE, "tie_word_embeddings": True}
    ),
    "qwen3-wide-heads-tied": Case(transformers.Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-yarn-mha": Case(
        transformers.Qwen3Config, {"rope_parameters": YARN_FACTOR, "num_key_value_heads": 6, "head_dim": 16}
    ),
}


def reference_model(case: Case, folder: Path) -> transformers.PreTrainedModel:
    """Save a random model to `folder`, with weights large enough that every part affects the logits."""
    torch.manual_seed(7)
    shapes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "eos_token_id": 2,
    }
    model = transformers.AutoModelForCausalLM.from_config(case.config_class(**{**shapes, **case.changes}))
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder, max_shard_size=case.shard)
    return model


def make_cache(model: Decoder, pages: int = 24, dtype: torch.dtype = torch.float32) -> KVCache:
    config = model.config
    return KVCache(config.cache_specs(), pages, PAGE, dtype, "cpu")


def tiny(architecture: str = "LlamaForCausalLM", **changes: Any) -> Decoder:
    values = {
        "architectures": [architecture],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    model = build_model(config_from_dict({**values, **changes}), torch.float32, "cpu")
    load_dummy(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 if parameter.dim() > 1 else 1.0)
    return model


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_transformers_in_prefill_and_decode(name: str, tmp_path: Path) -> None:
    reference = reference_model(CASES[name], tmp_path)
    config, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    if name == "mistral-wide-heads-sharded":
        assert len(list(tmp_path.glob("*.safetensors"))) > 1

    # two sequences of different lengths, on unordered pages, and a padded row in each decode step
    lengths, pages = (37, 22), ([9, 3, 14, 2, 8, 21, 5, 1], [4, 17, 6, 12, 7, 11, 10, 13])
    texts = [torch.randint(0, VOCAB, (length + 20,)) for length in lengths]
    expected = [reference(text[None]).logits[0] for text in texts]
    cache = make_cache(model)

    tokens = torch.cat([text[:length] for text, length in zip(texts, lengths, strict=True)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = model(tokens, positions, prefill_attention(cache, [(0, length) for length in lengths], pages))
    worst = (
        (model.compute_logits(hidden) - torch.cat([e[:n] for e, n in zip(expected, lengths, strict=True)])).abs().max()
    )

    table = torch.tensor([*pages, [0] * 8])
    for step in range(20):
        at = torch.tensor([lengths[0] + step, lengths[1] + step, 0])
        tokens = torch.tensor([texts[0][at[0]], texts[1][at[1]], 0])
        logits = model.compute_logits(model(tokens, at, decode_attention(cache, table, at)))
        for row in (0, 1):
            worst = max(worst, (logits[row] - expected[row][at[row]]).abs().max())
    assert float(worst) < TOLERANCE
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize("name", ["llama-llama3-biases", "qwen3-wide-heads-tied"])
def test_exported_weights_equal_the_checkpoint(name: str, tmp_path: Path) -> None:
    reference = reference_model(CASES[name], tmp_path)
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    exported = dict(model.named_weights())
    expected = reference.state_dict()
    if reference.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert exported.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(exported[key], tensor), key


@torch.no_grad()
def test_bfloat16_rounds_as_transformers_does(tmp_path: Path) -> None:
    reference = reference_model(CASES["qwen3-wide-heads-tied"], tmp_path).bfloat16()
    _, model = load_hf_folder(tmp_path, torch.bfloat16, "cpu")
    text = torch.randint(0, VOCAB, (30,))
    expected = reference(text[None]).logits[0].float()
    cache = make_cache(model, dtype=torch.bfloat16)
    hidden = model(text, torch.arange(30), prefill_attention(cache, [(0, 30)], [[1, 2, 3, 4]]))
    error = (model.compute_logits(hidden).float() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert float(error) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])  # 1e-3: eps decides
@torch.no_grad()
def test_norms_round_as_transformers_does(dtype: torch.dtype, scale: float) -> None:
    size, eps = 64, 3e-6
    reference = LlamaRMSNorm(size, eps).to(dtype)
    ours = RMSNorm(size, eps, dtype, torch.device("cpu"))
    heads = HeadNorm(2, 1, size, eps, dtype, torch.device("cpu"))
    weight = torch.rand(size).to(dtype)
    for parameter in (reference.weight, ours.weight, heads.q_weight):
        parameter.copy_(weight)
    heads.k_weight.copy_(weight * 2)
    x = (torch.randn(500, 3, size) * scale).to(dtype)
    expected, got, got_heads = reference(x), ours(x), heads(x)
    if dtype == torch.float32:
        torch.testing.assert_close(got, expected, atol=0, rtol=1e-6)
    else:
        assert float((got != expected).float().mean()) < 1e-3
        # quotient and product may both round the other way
        torch.testing.assert_close(got, expected, atol=0, rtol=2**-6)
    assert torch.equal(got_heads[:, :2], got[:, :2])
    assert torch.equal(got_heads[:, 2], got[:, 2] * 2)


@pytest.mark.parametrize("sizes", [(1, 7, 24), (8, 8, 16), (31, 1)])
@torch.no_grad()
def test_chunked_prefill_equals_whole_prefill(sizes: tuple[int, ...]) -> None:
    model, pages, total = tiny("Qwen3ForCausalLM"), [5, 2, 9, 1], 32
    tokens, positions = torch.randint(0, VOCAB, (total,)), torch.arange(total)
    whole_cache, chunk_cache = make_cache(model), make_cache(model)
    whole = model(tokens, positions, prefill_attention(whole_cache, [(0, total)], [pages]))
    start, outs = 0, []
    for size in sizes:
        rows = slice(start, start + size)
        outs.append(model(tokens[rows], positions[rows], prefill_attention(chunk_cache, [(start, size)], [pages])))
        start += size
    torch.testing.assert_close(torch.cat(outs), whole, atol=1e-4, rtol=0)
    for layer in range(2):
        torch.testing.assert_close(chunk_cache.k[layer], whole_cache.k[layer], atol=1e-4, rtol=0)


@torch.no_grad()
def test_padded_rows_write_only_the_scratch_page() -> None:
    model = tiny()
    cache = make_cache(model)
    for pages in (*cache.k, *cache.v):
        pages.normal_()
    before = [pages.clone() for pages in (*cache.k, *cache.v)]
    tokens = torch.zeros(4, dtype=torch.int64)
    hidden = model(tokens, tokens, decode_attention(cache, torch.zeros(4, 3, dtype=torch.int64), tokens))
    assert torch.isfinite(hidden).all()
    for old, new in zip(before, (*cache.k, *cache.v), strict=True):
        assert torch.equal(old[1:], new[1:])
        assert torch.equal(old[0, 1:], new[0, 1:])
        assert not torch.equal(old[0, 0], new[0, 0])


@torch.no_grad()
def test_a_rows_logits_do_not_depend_on_its_neighbours() -> None:
    model = tiny()
    ids, at = torch.tensor([11, 42, 7]), torch.tensor([5, 9, 0])
    table = torch.tensor([[1, 2], [3, 4], [5, 6]])
    cache = make_cache(model)
    for pages in (*cache.k, *cache.v):
        pages.normal_()
    first = model(ids, at, decode_attention(cache, table, at))
    ids[1:], at[1:] = torch.tensor([90, 3]), torch.tensor([15, 12])
    second = model(ids, at, decode_attention(cache, table, at))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


class _OpLog(TorchDispatchMode):
    """Record the ATen ops that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.views = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        if func.is_view or func._schema.name == "aten::_unsafe_view":
            self.views += 1
        else:
            self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("architecture", "limit"), [("LlamaForCausalLM", 26), ("Qwen3ForCausalLM", 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_decode_step_has_few_ops_and_no_host_sync(architecture: str, limit: int, dtype: torch.dtype) -> None:
    model = tiny(architecture).to(dtype)
    cache = make_cache(model, dtype=dtype)
    ids, at, table = torch.tensor([1, 2]), torch.tensor([3, 9]), torch.tensor([[1, 2], [3, 4]])
    with _OpLog() as step:
        model.compute_logits(model(ids, at, decode_attention(cache, table, at)))
    # ops that can't be captured: host reads, tensors from Python values, data-dependent shapes
    assert not {"_local_scalar_dense", "item", "lift_fresh", "nonzero", "repeat_interleave"} & set(step.names)
    cos, sin = model.rope(at)
    with _OpLog() as layer:
        model.layer(1, model.embed(ids), ForwardContext((cos, sin), decode_attention(cache, table, at)))
    with _OpLog() as attention:
        decode_attention(cache, table, at)
    assert len(layer.names) - len(attention.names) - 1 <= limit  # 1: the embedding


def test_a_tied_head_shares_the_embedding_storage() -> None:
    tied, untied = tiny(tie_word_embeddings=True), tiny()
    assert tied.lm_head.weight.data_ptr() == tied.embedding.weight.data_ptr()
    assert untied.lm_head.weight.data_ptr() != untied.embedding.weight.data_ptr()
    assert "lm_head.weight" not in tied.weight_slots()
    assert "lm_head.weight" in untied.weight_slots()


def test_every_linear_layer_takes_the_method_that_is_chosen_for_it() -> None:
    class Doubled(PlainWeight):
        def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return 2 * super().apply(layer, x, bias)

    asked: dict[str, tuple[dict[str, int], int]] = {}

    def choose(prefix: str, parts: Mapping[str, int], inputs: int) -> PlainWeight:
        asked[f"{prefix}.{next(iter(parts))}"] = dict(parts), inputs
        return Doubled() if prefix == "model.layers.1.mlp" else PLAIN

    config = tiny().config
    plain, model = (build_model(config, torch.float32, "cpu", methods=methods) for methods in (plain_weights, choose))
    for one in (plain, model):
        load_dummy(one)
    assert asked["model.layers.0.self_attn.q_proj"] == ({"q_proj": 64, "k_proj": 32, "v_proj": 32}, 32)
    assert len(asked) == 8 and asked["model.layers.1.mlp.down_proj"] == ({"down_proj": 32}, 48)
    x = torch.randn(3, 48)
    assert torch.equal(model.layers[1].mlp.down(x), 2 * plain.layers[1].mlp.down(x))
    assert torch.equal(model.layers[0].mlp.down(x), plain.layers[0].mlp.down(x))
