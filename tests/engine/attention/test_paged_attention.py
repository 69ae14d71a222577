"""Paged attention against plain attention in float64, and which cache slots it writes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.attention.cache_spec import (
    FullAttentionSpec,
    LatentSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    group_layers,
)
from engine.attention.kv_cache import KVCache
from engine.attention.sdpa import SdpaBackend
from engine.attention.selection import choose_backend
from engine.errors import ConfigError, ModelError
from tests.support.attention import decode_attention, prefill_attention, prefill_metadata

PAGE, DIM = 4, 16
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, scale: float = DIM**-0.5
) -> torch.Tensor:
    """Causal attention of q [L, H, D] (the last L positions) over k, v [S, KV, D], in float64: [L, H * D]."""
    length, heads, dim = q.shape
    k, v = (x.double().repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("lhd,shd->hls", q.double(), k) * scale
    later = torch.ones(length, k.shape[0], dtype=torch.bool).triu(k.shape[0] - length + 1)
    exps = scores.masked_fill(later, float("-inf")).exp()
    total = exps.sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.double().exp().view(-1, 1, 1)
    return torch.einsum("hls,shd->lhd", exps / total, v).reshape(length, -1)


def make_cache(kv_heads: int, dtype: torch.dtype = torch.float32, layers: int = 2, pages: int = 16) -> KVCache:
    """A cache full of large stale values, so that a wrong read shows in the result."""
    specs = [FullAttentionSpec(kv_heads=kv_heads, head_dim=DIM)] * layers
    cache = KVCache(specs, pages, PAGE, dtype, "cpu")
    for tensor in (*cache.k, *cache.v):
        tensor.normal_(0.0, 30.0)
    return cache


def rows(count: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """q, k, v of `count` tokens as slices of one projection, as in the models."""
    qkv = torch.randn(count, heads + 2 * kv_heads, DIM).to(dtype)
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_decode_equals_plain_attention_over_each_rows_own_tokens(
    layout: str, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    heads, kv_heads = HEADS[layout]
    pages = [[7, 2, 11, 5], [3, 9, 1, 4], [8, 6, 10, 12]]
    lengths = (1, 10, 16)  # a first token, one inside a page, one that fills the last page
    cache = make_cache(kv_heads, dtype)
    history = [rows(length, heads, kv_heads, dtype) for length in lengths]
    for sequence, own in zip(history, pages, strict=True):
        if len(sequence[0]) > 1:
            past = tuple(x[:-1] for x in sequence)
            prefill_attention(cache, [(0, len(past[0]))], [own])(1, *past)
    q, k, v = (torch.cat([sequence[i][-1:] for sequence in history]) for i in range(3))
    positions = torch.tensor([length - 1 for length in lengths])
    out = decode_attention(cache, torch.tensor(pages), positions)(1, q, k, v)
    expected = torch.cat([plain_attention(sequence[0][-1:], sequence[1], sequence[2]) for sequence in history])
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_wider_page_table_does_not_change_the_result() -> None:
    q, k, v = rows(2, 6, 2)
    positions, table = torch.tensor([3, 6]), torch.tensor([[1, 2, 0, 0, 0], [3, 4, 0, 0, 0]])
    cache = make_cache(2)
    narrow = decode_attention(cache, table[:, :2], positions)(0, q, k, v)
    wide = decode_attention(cache, table, positions)(0, q, k, v)
    torch.testing.assert_close(narrow, wide, atol=1e-4, rtol=0)  # values are about 30


def test_decode_writes_one_slot_per_row_of_one_layer() -> None:
    cache = make_cache(2)
    before = [tensor.clone() for tensor in (*cache.k, *cache.v)]
    q, k, v = rows(2, 6, 2)
    decode_attention(cache, torch.tensor([[5, 2], [3, 8]]), torch.tensor([6, 1]))(1, q, k, v)
    assert torch.equal(cache.k[1][2, 2], k[0]) and torch.equal(cache.v[1][2, 2], v[0])
    assert torch.equal(cache.k[1][3, 1], k[1]) and torch.equal(cache.v[1][3, 1], v[1])
    for index, (old, new) in enumerate(zip(before, (*cache.k, *cache.v), strict=True)):
        changed = (old != new).flatten(2).any(-1).nonzero().tolist()
        assert changed == ([[2, 2], [3, 1]] if index in (1, 3) else [])


def test_prefill_chunks_equal_plain_attention_and_leave_other_pages_alone() -> None:
    torch.manual_seed(1)
    heads, kv_heads = HEADS["gqa"]
    cache = make_cache(kv_heads)
    first, second = rows(13, heads, kv_heads), rows(9, heads, kv_heads)
    pages = ([9, 2, 5, 1], [4, 12, 6])
    untouched = [page for page in range(16) if page not in pages[0] + pages[1]]
    before = cache.k[0][untouched].clone()
    got: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    # the first sequence in chunks of 5, 7 and 1 tokens, together with the second in chunks of 1, 2 and 6
    for a, b in (((0, 5), (0, 1)), ((5, 7), (1, 2)), ((12, 1), (3, 6))):
        parts = [torch.cat((x[a[0] : sum(a)], y[b[0] : sum(b)])) for x, y in zip(first, second, strict=True)]
        out = prefill_attention(cache, [a, b], pages)(0, *parts)
        got[0].append(out[: a[1]])
        got[1].append(out[a[1] :])
    for sequence, outs in ((first, got[0]), (second, got[1])):
        torch.testing.assert_close(torch.cat(outs).double(), plain_attention(*sequence), atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.k[0][untouched], before)


def test_decode_equals_prefill_of_one_token() -> None:
    heads, kv_heads = HEADS["gqa"]
    q, k, v = rows(1, heads, kv_heads)
    one, other = make_cache(kv_heads), make_cache(kv_heads)
    for mine, theirs in zip((*one.k, *one.v), (*other.k, *other.v), strict=True):
        theirs.copy_(mine)
    decoded = decode_attention(one, torch.tensor([[3, 7, 1]]), torch.tensor([9]))(0, q, k, v)
    prefilled = prefill_attention(other, [(9, 1)], [[3, 7, 1]])(0, q, k, v)
    torch.testing.assert_close(decoded, prefilled, atol=1e-4, rtol=0)
    assert torch.equal(one.k[0], other.k[0]) and torch.equal(one.v[0], other.v[0])


def test_each_layers_keys_and_values_have_storage_of_their_own() -> None:
    cache = make_cache(2, layers=3)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*cache.k, *cache.v)}) == 6
    assert cache.nbytes == 2 * 3 * 16 * PAGE * 2 * DIM * 4


def test_clear_zeroes_pages_where_they_are() -> None:
    cache = make_cache(2)
    cache.k[0].fill_(float("nan"))
    addresses = [tensor.data_ptr() for tensor in (*cache.k, *cache.v)]
    cache.clear()
    assert all(not tensor.any() for tensor in (*cache.k, *cache.v))
    assert addresses == [tensor.data_ptr() for tensor in (*cache.k, *cache.v)]


def test_prefill_without_host_lengths_is_rejected() -> None:
    cache = make_cache(2)
    metadata = prefill_metadata(cache, [(0, 3)], [[1]])._replace(spans=None)
    with pytest.raises(ConfigError, match="lengths of the chunks on the host"):
        SdpaBackend(cache, 1).prefill(metadata)


@pytest.mark.parametrize("window", [1, 3, 6, 64])
def test_windowed_layers_attend_to_the_last_tokens_only(window: int) -> None:
    torch.manual_seed(2)
    heads, kv_heads = HEADS["gqa"]
    full = FullAttentionSpec(kv_heads=kv_heads, head_dim=DIM)
    specs = [full, SlidingWindowSpec(kv_heads=kv_heads, head_dim=DIM, size=window)]
    cache = KVCache(specs, 16, PAGE, torch.float32, "cpu")
    assert [group.window for group in cache.groups] == [None, window] and cache.k[0] is cache.k[1]
    q, k, v = rows(15, heads, kv_heads)
    pages, outs = [[9, 2, 5, 1]], []
    for start, length in ((0, 5), (5, 7)):
        part = [x[start : start + length] for x in (q, k, v)]
        outs.append(prefill_attention(cache, [(start, length)], pages)(1, *part))
    for position in range(12, 15):
        part = [x[position : position + 1] for x in (q, k, v)]
        outs.append(decode_attention(cache, torch.tensor(pages), torch.tensor([position]))(1, *part))
    for position, found in enumerate(torch.cat(outs)):
        seen = slice(max(0, position - window + 1), position + 1)
        expected = plain_attention(q[position : position + 1], k[seen], v[seen])
        torch.testing.assert_close(found.double(), expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_take_weight_and_give_no_value(window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(2)
    heads, kv_heads = HEADS["gqa"]
    scale = 0.21  # 1 / scale is no bfloat16
    options = {"kv_heads": kv_heads, "head_dim": DIM, "scale": scale, "sinks": True}
    spec = FullAttentionSpec(**options) if window is None else SlidingWindowSpec(**options, size=window)
    cache = KVCache([spec], 16, PAGE, dtype, "cpu")
    q, k, v = rows(15, heads, kv_heads, dtype)
    sinks = torch.tensor([-8.0, -1.0, 0.0, 1.0, 3.0, 9.0]).to(dtype)
    pages, outs = [[9, 2, 5, 1]], []
    for start, length in ((0, 5), (5, 7)):
        part = [x[start : start + length] for x in (q, k, v)]
        outs.append(prefill_attention(cache, [(start, length)], pages)(0, *part, sinks))
    for position in range(12, 15):
        part = [x[position : position + 1] for x in (q, k, v)]
        outs.append(decode_attention(cache, torch.tensor(pages), torch.tensor([position]))(0, *part, sinks))
    for position, found in enumerate(torch.cat(outs)):
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        expected = plain_attention(q[position : position + 1], k[seen], v[seen], sinks, scale)
        torch.testing.assert_close(found.double(), expected[0], atol=tolerance, rtol=tolerance)


def test_backends_are_chosen_by_what_they_support() -> None:
    specs, cpu = [FullAttentionSpec(kv_heads=2, head_dim=DIM)], torch.device("cpu")
    assert choose_backend(specs, torch.float16, cpu) is SdpaBackend
    with pytest.raises(ConfigError, match="sdpa: no support for dtype float64"):
        choose_backend(specs, torch.float64, cpu)
    with pytest.raises(ConfigError, match=r"sdpa: no support for head size 2048 \(at most 1024\)"):
        choose_backend([FullAttentionSpec(kv_heads=2, head_dim=2048)], torch.float32, cpu)


def test_groups_have_equally_many_layers_so_that_any_page_fits_any_group() -> None:
    full = FullAttentionSpec(kv_heads=2, head_dim=DIM)
    sliding = SlidingWindowSpec(kv_heads=2, head_dim=DIM, size=8)
    groups = group_layers([sliding, sliding, full, sliding, sliding, full, sliding])
    assert groups == ((8, (0, 1)), (8, (3, 4)), (8, (6,)), (None, (2, 5)))
    with pytest.raises(ModelError, match="found 1 x 16, 2 x 16"):
        group_layers([full, FullAttentionSpec(kv_heads=1, head_dim=DIM)])
    with pytest.raises(ModelError, match="found a latent vector of 8, 2 x 16"):
        group_layers([full, LatentSpec(width=8, scale=1.0)])


def test_recurrent_layers_are_in_no_group() -> None:
    full, recurrent = FullAttentionSpec(kv_heads=2, head_dim=DIM), RecurrentStateSpec(shapes=((3,),))
    assert group_layers([recurrent, full, recurrent, full]) == ((None, (1, 3)),)
    assert group_layers([recurrent]) == ()
    cache = KVCache([recurrent, full], 4, PAGE, torch.float32, "cpu")
    assert cache.nbytes == 2 * 4 * PAGE * 2 * DIM * 4 and not cache.k[0].numel()
    with pytest.raises(ModelError, match="layer 0 called attention, but its cache spec is RecurrentStateSpec"):
        decode_attention(cache, torch.tensor([[1]]), torch.tensor([0]))(0, *rows(1, 2, 2))


@pytest.mark.parametrize("value_width", [None, 5])
def test_latent_layers_attend_to_one_vector_per_token(value_width: int | None) -> None:
    torch.manual_seed(3)
    heads, width, scale, values = 3, 8, 0.7, value_width or 8
    cache = KVCache([LatentSpec(width=width, value_width=value_width, scale=scale)] * 2, 16, PAGE, torch.float32, "cpu")
    assert cache.nbytes == 2 * 16 * PAGE * width * 4
    for pages in cache.k:
        pages.normal_(0.0, 30.0)
    before = cache.k[0].clone()
    q, latents = torch.randn(15, heads, width), torch.randn(15, 1, width)
    pages, outs = [[9, 2, 5, 1]], []
    for start, length in ((0, 5), (5, 7)):
        part = slice(start, start + length)
        outs.append(prefill_attention(cache, [(start, length)], pages)(1, q[part], latents[part], None))
    for position in range(12, 15):
        part = slice(position, position + 1)
        attention = decode_attention(cache, torch.tensor(pages), torch.tensor([position]))
        outs.append(attention(1, q[part], latents[part], None))
    k = latents.squeeze(1).double()
    scores = torch.einsum("lhd,sd->hls", q.double(), k) * scale
    weights = scores.masked_fill(torch.ones(15, 15, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    expected = torch.einsum("hls,se->lhe", weights, k[:, :values]).reshape(15, -1)
    torch.testing.assert_close(torch.cat(outs).double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.k[0], before) and torch.equal(cache.k[1][9], latents[:PAGE])


def test_a_backend_names_the_specs_that_it_lacks() -> None:
    support = dataclasses.replace(SdpaBackend.support, specs=frozenset({FullAttentionSpec, SlidingWindowSpec}))
    latent, cpu = LatentSpec(width=8, scale=1.0), torch.device("cpu")
    assert support.missing([latent], torch.float32, cpu) == "layers with LatentSpec"
    assert support.missing([FullAttentionSpec(kv_heads=2, head_dim=DIM)], torch.float32, cpu) is None
    assert SdpaBackend.support.missing([latent], torch.float32, cpu) is None
    with_sinks = FullAttentionSpec(kv_heads=2, head_dim=DIM, sinks=True)
    support = dataclasses.replace(SdpaBackend.support, sinks=False)
    assert support.missing([with_sinks], torch.float32, cpu) == "attention sinks"
