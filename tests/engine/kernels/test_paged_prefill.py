"""Triton prefill attention against float64: varlen layouts, later chunks, padding, page order, NaN poison."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.kernels.launch import SHARED_BYTES
from engine.kernels.paged_decode import NormRope
from engine.kernels.paged_prefill import VarlenLayout, append_kv, choose_tile, norm_rope_append, paged_prefill
from engine.models.decoder_tensors import HeadLayout

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


WINDOW_LAYOUTS = [
    [(0, 5)],
    [(0, 0), (0, 33), (64, 90), (5, 0), (129, 2), (200, 1)],
]
if INTERPRETED:
    TOLERANCES, WINDOWS = {torch.float32: 1e-6, torch.float16: 2e-3}, [None, 1, 50]
    SHAPES = [(4, 2, 32), (3, 1, 80), (2, 1, 256)]
else:  # every shape, window and dtype compiles a kernel
    TOLERANCES, WINDOWS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}, [None, 50, 1000]
    SHAPES = [(4, 4, 80), (16, 8, 128), (8, 4, 256)]
    WINDOW_LAYOUTS += [[(0, 1024)] * 4, [(3000, 700), (0, 257), (1, 1)], [(900, 1)] * 100]


def make_pages(chunks, window, kv_heads, dim, dtype, seed=0):
    """Page table and caches of sequences whose keys 0..start-1 are stored; every slot that no query may read is NaN.

    With a window, pages wholly before the first query's window are released: their table entries are 0.
    """
    generator = torch.Generator().manual_seed(seed)
    pages_each = -(-max(start + length for start, length in chunks) // PAGE)
    page_table = torch.zeros(len(chunks) + 1, pages_each, dtype=torch.int64)
    page_table[1:] = (torch.randperm(len(chunks) * pages_each, generator=generator) + 1).view(len(chunks), pages_each)
    shape = (len(chunks) * pages_each + 1, PAGE, kv_heads, dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    for row, (start, _) in enumerate(chunks, 1):
        first = 0 if window is None else max(start - window + 1, 0)
        page_table[row, : first // PAGE] = 0
        positions = torch.arange(first, start)
        for cache in caches:
            values = torch.randn(len(positions), kv_heads, dim, generator=generator)
            cache[page_table[row, positions // PAGE], positions % PAGE] = values.to(dtype)
    return page_table.to(DEVICE), caches[0].to(DEVICE), caches[1].to(DEVICE)


def make_layout(chunks, padding):
    lengths = [length for _, length in chunks]
    positions = torch.cat([torch.arange(start, start + length) for start, length in chunks] + [torch.zeros(padding)])
    rows = torch.cat([torch.full((length,), row) for row, length in enumerate(lengths, 1)] + [torch.zeros(padding)])
    return VarlenLayout(
        positions.long().to(DEVICE),
        rows.long().to(DEVICE),
        torch.tensor(lengths).cumsum(0).to(DEVICE),
        torch.tensor([start for start, _ in chunks]).to(DEVICE),
        torch.arange(1, len(chunks) + 1).to(DEVICE),
    )


def window_attention(q, k, v, start, window, scale):
    """Attention in float64 of queries q [L, H, D] from position `start` over k, v [start + L, KV, D]: [L, H, D]."""
    place = torch.arange(start, start + len(q), device=q.device)[:, None]
    key = torch.arange(start + len(q), device=q.device)[None]
    seen = key <= place if window is None else (key <= place) & (key > place - window)
    group = q.shape[1] // k.shape[1]
    k, v = (torch.where(seen.any(0)[:, None, None], t.double(), 0).repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    SHAPES,
)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunks", WINDOW_LAYOUTS)
def test_chunks_attend_within_the_window_only(chunks, window, heads, kv_heads, dim, dtype):
    padding, scale = 7, 0.3 * dim**-0.5
    table, k_cache, v_cache = make_pages(chunks, window, kv_heads, dim, dtype)
    layout = make_layout(chunks, padding)
    tokens = sum(length for _, length in chunks) + padding
    generator = torch.Generator().manual_seed(1)
    projected = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(DEVICE, dtype)
    q, k, v = projected.split((heads, kv_heads, kv_heads), 1)
    append_kv(k, v, k_cache, v_cache, table, layout.token_slots, layout.positions)
    assert k_cache[0].isnan().all()  # padding wrote nothing to the scratch page
    out = torch.full((tokens, heads * dim), 7.0, dtype=dtype, device=DEVICE)
    assert paged_prefill(q, k_cache, v_cache, table, layout, scale, out, window=window) is out
    assert (out[-padding:] == 7).all()
    first = 0
    for row, (start, length) in enumerate(chunks, 1):
        rows = slice(first, first + length)
        first += length
        if length:
            keys, values = (cache[table[row]].flatten(0, 1)[: start + length] for cache in (k_cache, v_cache))
            assert torch.equal(keys[start:], k[rows])
            assert torch.equal(values[start:], v[rows])
            wanted = window_attention(q[rows], keys, values, start, window, scale)
            assert relative_error(out[rows].view(length, heads, dim), wanted) < TOLERANCES[dtype]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize(("tokens", "heads", "group"), [(64, 8, 1), (64, 8, 8), (8192, 32, 4)])
def test_tiles_fit_the_shared_memory_of_a_program(tokens, heads, group, dim, itemsize):
    tile = choose_tile(tokens, heads, group, dim, itemsize)
    padded = 1 << (dim - 1).bit_length()
    assert (tile.rows + 2 * tile.stages * tile.block_keys) * padded * itemsize <= SHARED_BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(window=0), "window is 0"),
        (dict(q=torch.zeros(5, 4, 32, dtype=torch.float16)), "one dtype"),
        (dict(q=torch.zeros(5, 5, 32)), "5 query heads"),
        (dict(out=torch.zeros(5, 64)), "out must be"),
    ],
)
def test_prefill_rejects_mismatches_by_name(change, message):
    table, k_cache, v_cache = make_pages([(0, 5)], None, 2, 32, torch.float32)
    values = dict(q=torch.zeros(5, 4, 32), out=torch.zeros(5, 128), window=None) | change
    q, out = values["q"].to(DEVICE), values["out"].to(DEVICE)
    with pytest.raises(ValueError, match=message):
        paged_prefill(q, k_cache, v_cache, table, make_layout([(0, 5)], 0), 1.0, out, window=values["window"])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((5, 2, 16), (5, 2, 16), 5), "k and v"),
        (((5, 2, 32), (5, 1, 32), 5), "k and v"),
        (((5, 2, 32),) * 2 + (4,), "rows"),
    ],
)
def test_append_rejects_mismatches_by_name(shapes, message):
    table, k_cache, v_cache = make_pages([(0, 5)], None, 2, 32, torch.float32)
    k, v, rows = (torch.zeros(shape, device=DEVICE) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        append_kv(k, v, k_cache, v_cache, table, rows.long(), torch.arange(5, device=DEVICE))
