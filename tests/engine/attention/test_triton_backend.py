"""The Triton backend against the SDPA backend: layers with and without a window, packed prefill and decode."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.kernels import DEVICE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.attention.cache_spec import FullAttentionSpec, LatentSpec, SlidingWindowSpec
from engine.attention.kv_cache import FP8_DTYPES, KVCache
from engine.attention.triton import TritonBackend
from tests.support.attention import backend_for, decode_attention, prefill_metadata

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
]
PAGE, HEADS, DIM, WINDOW = 4, 4, 32, 6
FULL = FullAttentionSpec(kv_heads=2, head_dim=DIM, scale=0.1)
SPECS = [FULL, SlidingWindowSpec(kv_heads=2, head_dim=DIM, scale=0.1, size=WINDOW)]
WITH_SINKS = [dataclasses.replace(spec, sinks=True) for spec in SPECS]
PAGES = [[9, 2, 5, 1], [3, 7, 4, 6]]


@torch.no_grad()
@pytest.mark.parametrize("stored", [None, *FP8_DTYPES.values()], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "window"])
def test_prefill_and_decode_equal_sdpa(layer, sinks, stored):
    own = (torch.tensor([-4.0, 0.0, 1.0, 5.0], device=DEVICE),) if sinks else ()
    caches = {
        name: KVCache(WITH_SINKS if sinks else SPECS, 12, PAGE, torch.float32, DEVICE, stored)
        for name in ("sdpa", "triton")
    }

    def split(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = qkv.split((HEADS, 2, 2), 1)
        if INTERPRETED:  # the interpreter rounds to fp8 wrongly
            k, v = (caches["sdpa"].decode(caches["sdpa"].encode(one)) for one in (k, v))
        return q, k, v

    generator = torch.Generator().manual_seed(0)
    for chunks in ([(0, 5), (0, 3)], [(5, 7), (3, 9)]):
        count = sum(length for _, length in chunks)
        qkv = torch.randn(count + 2, HEADS + 4, DIM, generator=generator).to(DEVICE)
        q, k, v = split(qkv)
        metadata = {name: prefill_metadata(cache, chunks, PAGES, padding=2) for name, cache in caches.items()}
        found = backend_for(caches["triton"], "triton").prefill(metadata["triton"])(layer, q, k, v, *own)
        wanted = backend_for(caches["sdpa"], "sdpa").prefill(metadata["sdpa"])(layer, q, k, v, *own)
        assert relative_error(found[:count], wanted[:count]) < 1e-5
        assert not found[count:].any()
    table = torch.tensor([*PAGES, [0] * 4], device=DEVICE)
    for step in range(3):
        qkv = torch.randn(3, HEADS + 4, DIM, generator=generator).to(DEVICE)
        positions = torch.tensor([12 + step, 12 + step, 0], device=DEVICE)
        outs = [decode_attention(caches[name], table, positions, name)(layer, *split(qkv), *own) for name in caches]
        assert relative_error(outs[1], outs[0]) < 1e-5


def test_latent_layers_are_left_to_another_backend():
    found = TritonBackend.support.missing([LatentSpec(width=32, scale=1.0)], torch.bfloat16, torch.device("cuda"))
    assert found == "layers with LatentSpec"
