"""Bounded attention scores: softcap * tanh(scores / softcap), on the SDPA backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.attention.cache_spec import FullAttentionSpec, SlidingWindowSpec
from engine.attention.kv_cache import KVCache
from engine.attention.sdpa import SdpaBackend
from tests.support.attention import decode_attention, prefill_attention

HEADS, KV_HEADS, DIM, PAGE, LENGTH = 6, 2, 16, 4, 22
PAGES = [3, 1, 6, 2, 5, 4]


def plain_attention(q, k, v, scale, softcap, window) -> torch.Tensor:
    """Attention of a whole sequence in float64, [T, H * D]."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("lhd,shd->hls", q, k) * scale
    scores = softcap * (scores / softcap).tanh()
    query, key = torch.arange(len(q)).unsqueeze(1), torch.arange(len(q))
    seen = (key <= query) & (key > query - window)
    return torch.einsum("hls,shd->lhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_chunks_and_decodes_bound_their_scores(dtype, error, window, softcap):
    torch.manual_seed(0)
    shared = {"kv_heads": KV_HEADS, "head_dim": DIM, "scale": 0.3, "softcap": softcap}
    spec = FullAttentionSpec(**shared) if window is None else SlidingWindowSpec(**shared, size=window)
    kv = KVCache([spec], 8, PAGE, dtype, "cpu")
    q, k, v = (3 * torch.randn(LENGTH, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = []
    for start, end in ((0, 9), (9, 20)):
        rows = slice(start, end)
        attention = prefill_attention(kv, [(start, end - start)], [PAGES])
        found.append(attention(0, q[rows], k[rows], v[rows]))
    for position in range(20, LENGTH):
        at = torch.tensor([position])
        found.append(decode_attention(kv, torch.tensor([PAGES]), at)(0, q[at], k[at], v[at]))
    wanted = plain_attention(q, k, v, 0.3, softcap, window or LENGTH)
    assert float((torch.cat(found).double() - wanted).abs().max() / wanted.abs().max()) < error


def test_a_backend_that_cannot_bound_scores_says_so():
    cannot, cpu = replace(SdpaBackend.support, softcap=False), torch.device("cpu")
    plain = FullAttentionSpec(kv_heads=2, head_dim=16)
    assert cannot.missing([plain], torch.float32, cpu) is None
    assert cannot.missing([plain, replace(plain, softcap=5.0)], torch.float32, cpu) == "soft-caps of attention scores"
