"""Models on a GPU: logits match the CPU with both decode kernels, and a captured step follows its inputs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: torch.cuda.is_available() is False", allow_module_level=True)

from engine.attention.kv_cache import KVCache
from engine.loader.weights import load_dummy, load_weights, stage_update
from engine.models import Decoder, build_model, config_from_dict
from tests.support.attention import decode_attention, prefill_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # from Triton, about Python's ast and numpy scalars
]

PAGE, VOCAB = 16, 500
PAGES = [[9, 3, 14, 2], [4, 17, 6, 12]]
IMPLS = ["sdpa"] + (["triton"] if importlib.util.find_spec("triton") else [])


def make_model(architecture: str, dtype: torch.dtype, device: str, **changes: Any) -> Decoder:
    config = config_from_dict(
        {
            "architectures": [architecture],
            "vocab_size": VOCAB,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 256,
            **changes,
        }
    )
    source = build_model(config, torch.float32, "cpu")
    load_dummy(source, seed=1)
    scaled = ((name, tensor * (4.0 if tensor.dim() > 1 else 1.0)) for name, tensor in source.named_weights())
    model = build_model(config, dtype, device)
    load_weights(model, scaled, "dummy")
    return model


def make_cache(model: Decoder) -> KVCache:
    config = model.config
    return KVCache(config.cache_specs(), 20, PAGE, model.dtype, model.device)


@torch.no_grad()
def run_texts(model: Decoder, impl: str, steps: int = 6) -> torch.Tensor:
    """Return logits [rows, vocab] of two texts: chunked prefill, then decode steps with a padded row."""
    device, cache = model.device, make_cache(model)
    tokens = torch.arange(2 * 64).view(2, 64) * 37 % VOCAB
    outs = []
    for chunks in ([(0, 33), (0, 7)], [(33, 9), (7, 20)]):
        ids = torch.cat([tokens[row, start : start + length] for row, (start, length) in enumerate(chunks)])
        positions = torch.cat([torch.arange(start, start + length) for start, length in chunks])
        hidden = model(ids.to(device), positions.to(device), prefill_attention(cache, chunks, PAGES))
        outs.append(model.compute_logits(hidden))
    table = torch.tensor([*PAGES, [0, 0, 0, 0]], device=device)
    for step in range(steps):
        positions = torch.tensor([42 + step, 27 + step, 0])
        ids = torch.stack([tokens[0, positions[0]], tokens[1, positions[1]], torch.tensor(0)])
        attention = decode_attention(cache, table, positions.to(device), impl)
        outs.append(model.compute_logits(model(ids.to(device), positions.to(device), attention))[:2])
    return torch.cat(outs).float().cpu()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_float32_logits_match_the_cpu(architecture: str, impl: str) -> None:
    on_cpu = run_texts(make_model(architecture, torch.float32, "cpu"), "sdpa")
    on_gpu = run_texts(make_model(architecture, torch.float32, "cuda"), impl)
    assert float(on_cpu.abs().max()) > 1.0
    torch.testing.assert_close(on_gpu, on_cpu, atol=1e-3, rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_logits_are_near_float32(impl: str) -> None:
    exact = run_texts(make_model("Qwen3ForCausalLM", torch.float32, "cpu"), "sdpa")
    rounded = run_texts(make_model("Qwen3ForCausalLM", torch.bfloat16, "cuda"), impl)
    assert float((rounded - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_a_captured_step_follows_tokens_pages_and_updated_weights(impl: str) -> None:
    model = make_model("Qwen3ForCausalLM", torch.bfloat16, "cuda")
    cache = make_cache(model)
    ids, positions = torch.tensor([1, 2], device="cuda"), torch.tensor([20, 33], device="cuda")
    table = torch.tensor(PAGES, device="cuda")

    def step() -> torch.Tensor:
        return model.compute_logits(model(ids, positions, decode_attention(cache, table, positions, impl)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(), step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for update in (False, True):
        ids.copy_(torch.tensor([77, 5])), positions.copy_(torch.tensor([40, 3]))
        table.copy_(torch.tensor(PAGES[::-1]))
        if update:
            other = {name: -tensor for name, tensor in model.named_weights() if "mlp" in name}
            stage_update(model.weight_slots(), other.items())
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())
        assert torch.isfinite(replayed).all()


@torch.no_grad()
def test_dummy_weights_are_generated_on_the_device() -> None:
    model = make_model("LlamaForCausalLM", torch.bfloat16, "cuda")
    load_dummy(model, 3)
    first = model.layers[0].mlp.down.weight.clone()
    load_dummy(model, 3)
    assert torch.equal(first, model.layers[0].mlp.down.weight)
    assert 0.018 < float(first.float().std()) < 0.022
