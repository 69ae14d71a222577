"""Triton prefill attention against float64: varlen layouts, later chunks, padding, page order, NaN poison."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.kernels.paged_decode import NormRope
from engine.kernels.paged_prefill import VarlenLayout, norm_rope_append, paged_prefill
from engine.models.dense_tensors import HeadLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
]
TOLERANCE = 3e-3 if INTERPRETED else 1e-2
PAGE = 16
LAYOUTS = [  # (start, length) of each chunk
    [(0, 5)],
    [(0, 130)],
    [(37, 20)],
    [(0, 3), (64, 140), (0, 16), (15, 1)],
    [(0, 0), (0, 33), (5, 0), (129, 2)],
]
if not INTERPRETED:
    LAYOUTS += [[(0, 1024)] * 4, [(3000, 700), (0, 257), (1, 1)], [(0, 1)] * 100]


def norm_rope(x, positions, cos, sin, weight, eps):
    """Head norm and rotation in float64, with the table layout of engine.layers.rotary."""
    x = x.double()
    if weight is not None:
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()
    cos, sin = cos.double()[positions].unsqueeze(1), sin.double()[positions].unsqueeze(1)
    return x * cos + torch.roll(x, x.shape[-1] // 2, dims=-1) * sin


@pytest.mark.parametrize(("normed", "by_group"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 2, 32), (3, 1, 16)] if INTERPRETED else [(16, 8, 128), (32, 8, 128), (9, 3, 64), (4, 4, 80)],
)
@pytest.mark.parametrize("chunks", LAYOUTS)
def test_varlen_chunks_equal_float64_attention(chunks, heads, kv_heads, dim, normed, by_group):
    generator = torch.Generator().manual_seed(0)
    padding, pages_each = 7, -(-max(start + length for start, length in chunks) // PAGE)
    lengths = [length for _, length in chunks]
    tokens = sum(lengths) + padding
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(DEVICE, DTYPE)
    page_table = torch.zeros(len(chunks) + 1, pages_each, dtype=torch.int64)
    page_table[1:] = (torch.randperm(len(chunks) * pages_each, generator=generator) + 1).view(len(chunks), pages_each)
    caches = [torch.full(((len(chunks) * pages_each + 1) * PAGE, kv_heads, dim), float("nan")) for _ in range(2)]
    for row, (start, _) in enumerate(chunks, 1):
        for place in range(start):
            for cache in caches:
                cache[page_table[row, place // PAGE] * PAGE + place % PAGE] = torch.randn(
                    kv_heads, dim, generator=generator
                )
    k_cache, v_cache = (cache.view(-1, PAGE, kv_heads, dim).to(DEVICE, DTYPE) for cache in caches)
    before = [k_cache.clone(), v_cache.clone()]
    angles = torch.outer(torch.arange(pages_each * PAGE).double(), 0.5 ** torch.arange(dim // 2).double())
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    cos, sin = cos.to(DEVICE, DTYPE), sin.to(DEVICE, DTYPE)
    weights = [torch.randn(dim, generator=generator).to(DEVICE, DTYPE) + 1 if normed else None for _ in range(2)]
    positions = torch.cat([torch.arange(start, start + length) for start, length in chunks] + [torch.zeros(padding)])
    slots = torch.cat([torch.full((length,), row) for row, length in enumerate(lengths, 1)] + [torch.zeros(padding)])
    layout = VarlenLayout(
        positions.long().to(DEVICE),
        slots.long().to(DEVICE),
        torch.tensor(lengths).cumsum(0).to(DEVICE),
        torch.tensor([start for start, _ in chunks]).to(DEVICE),
        torch.arange(1, len(chunks) + 1).to(DEVICE),
    )
    table = page_table.to(DEVICE)
    q, k, v = HeadLayout(heads, kv_heads, dim, by_group).cut(torch.empty_like(qkv))
    for place, part in zip((q, k, v), HeadLayout(heads, kv_heads, dim, False).cut(qkv), strict=True):
        place.copy_(part)
    norm_rope_append(q, k, v, k_cache, v_cache, table, layout, NormRope(cos, sin, *weights, 1e-6))
    out = paged_prefill(
        q, k_cache, v_cache, table, layout, dim**-0.5, torch.full((tokens, heads * dim), 7.0).to(DEVICE, DTYPE)
    )
    assert (out[sum(lengths) :] == 7).all()
    assert torch.equal(k_cache[0].isnan(), before[0][0].isnan())  # padding wrote nothing to the scratch page
    first = 0
    for row, (start, length) in enumerate(chunks, 1):
        rows, pages = slice(first, first + length), table[row]
        first += length
        if not length:
            continue
        split = qkv[rows].view(length, -1, dim)
        place = positions[rows].long().to(DEVICE)
        q = norm_rope(split[:, :heads], place, cos, sin, weights[0], 1e-6)
        k_old = before[0][pages].reshape(-1, kv_heads, dim)[:start].double()
        v_old = before[1][pages].reshape(-1, kv_heads, dim)[:start].double()
        k = torch.cat((k_old, norm_rope(split[:, heads : heads + kv_heads], place, cos, sin, weights[1], 1e-6)))
        v = torch.cat((v_old, split[:, heads + kv_heads :].double()))
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        seen = torch.arange(start + length, device=DEVICE)[None] <= place[:, None]
        wanted = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
        assert relative_error(out[rows].view(length, heads, dim), wanted) < TOLERANCE
        written = k_cache[pages].reshape(-1, kv_heads, dim)[start : start + length]
        assert relative_error(written, k[start:, :: heads // kv_heads]) < TOLERANCE
        assert torch.equal(
            v_cache[pages].reshape(-1, kv_heads, dim)[start : start + length], split[:, heads + kv_heads :]
        )
