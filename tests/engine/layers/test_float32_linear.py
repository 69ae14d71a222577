"""Logits in float32: the GEMM, the head, and the tokens that the engine chooses from them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.config import EngineConfig
from engine.engine import Engine
from engine.layers import float32_linear
from engine.layers.float32_linear import linear_float32
from engine.models.decoder import Decoder


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "block_bytes"), [(100, 8 << 20), (100, 1), (96, 1), (1003, 1 << 15), (16, 1)])
def test_the_product_equals_float64(rows, dtype, outputs, block_bytes, monkeypatch):
    """Also where the last block of the weight is shorter than the others."""
    monkeypatch.setattr(float32_linear, "BLOCK_BYTES", block_bytes)
    x, weight = random(rows, 72, seed=0).to(dtype), random(outputs, 72, seed=1).to(dtype)
    found, wanted = linear_float32(x, weight), x.double() @ weight.double().T
    assert found.dtype == torch.float32 and found.shape == (rows, outputs)
    assert (found - wanted).abs().max() < 1e-4
    if dtype != torch.float32:
        assert (F.linear(x, weight) - wanted).abs().max() > 1e-3, "which the 16-bit product does not reach"


def test_without_onednn_the_product_is_the_same(monkeypatch):
    x, weight = random(3, 64, seed=0).bfloat16(), random(80, 64, seed=1).bfloat16()
    wanted = x.double() @ weight.double().T
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert (linear_float32(x, weight) - wanted).abs().max() < 1e-4


@pytest.fixture(scope="module", params=["local", "none"])
def engine(request, tiny_model):
    config = EngineConfig(
        model=str(tiny_model), dtype="bfloat16", num_threads=1, max_num_seqs=4, cuda_graph_impl=request.param,
        graph_manifest="none",
    )  # fmt: skip
    with Engine(config) as engine:
        yield engine


def test_logits_are_those_of_a_float32_head(engine):
    runner = engine.loop.executor.worker.runner
    model = runner.model
    assert isinstance(model, Decoder) and model.dtype == torch.bfloat16 and model.logits_dtype == torch.float32
    assert runner.buffers["logits"].dtype == torch.float32 and runner.buffers["hidden"].dtype == torch.bfloat16
    hidden = random(5, model.config.hidden_size, seed=2).bfloat16()
    with torch.inference_mode():
        found = model.compute_logits(hidden)
        wanted = F.linear(model.norm(hidden).float(), model.lm_head.weight.float())
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_of_two_tokens_that_tie_in_bfloat16_the_more_likely_one_is_chosen(engine):
    model = engine.loop.executor.worker.runner.model
    hidden, weight = random(1, model.config.hidden_size, seed=3).bfloat16(), model.lm_head.weight
    saved, first, second = weight.clone(), 250, 251
    with torch.inference_mode():
        x = model.norm(hidden)
        weight[first] = weight[second] = 3 * x[0]
        weight[second, 0] *= 1 + 2**-7  # away from 0, so the logit grows by less than its step in bfloat16
        try:
            rounded, logits = F.linear(x, weight)[0], torch.empty(1, len(weight))
            model.head(hidden, logits, after_layer=False)
        finally:
            weight.copy_(saved)
    assert rounded[first] == rounded[second] == rounded.max()
    assert logits.argmax() == second and logits[0, second] > logits[0, first]
