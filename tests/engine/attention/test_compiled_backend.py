"""Decode attention of the compiled CPU kernel beside a float64 reference, over pages in any order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.attention.cache_spec import FullAttentionSpec, SlidingWindowSpec
from engine.attention.compiled import CompiledBackend
from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata
from engine.attention.selection import choose_backend
from engine.kernels.cpu_library import cpu_kernels_loaded

pytestmark = pytest.mark.skipif(not cpu_kernels_loaded(), reason="needs a C++ compiler and AVX2")
CPU = torch.device("cpu")
PAGE, WIDTH, ENTRIES = 8, 12, 6  # tokens of a page, pages of a sequence, sequences
# query heads, KV heads, head size, window: of common families, and odd ones
SHAPES = [(9, 3, 64, None), (4, 4, 80, None), (14, 2, 128, None), (7, 1, 16, 5), (32, 4, 96, 37), (10, 2, 256, 1)]


def spec_of(kv_heads: int, head_dim: int, window: int | None) -> FullAttentionSpec | SlidingWindowSpec:
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim}
    return FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(**sizes, size=window)


def random_step(shape: tuple, seed: int = 0) -> tuple:
    """Return a cache with random pages, q, k, v of 5 rows, and the step's metadata."""
    heads, kv_heads, head_dim, window = shape
    rng = torch.Generator().manual_seed(seed)
    kv = KVCache([spec_of(kv_heads, head_dim, window)], ENTRIES * WIDTH + 1, PAGE, torch.bfloat16, CPU)
    for pages in (kv.k[0], kv.v[0]):
        pages.copy_(torch.randn(pages.shape, generator=rng))
    tables = torch.randperm(ENTRIES * WIDTH, generator=rng).add(1).view(1, ENTRIES, WIDTH)
    rows, positions = torch.tensor([3, 1, 0, 5, 4]), torch.tensor([0, 37, PAGE * WIDTH - 1, 16, 7])
    qkv = torch.randn(5, heads + 2 * kv_heads, head_dim, generator=rng).bfloat16()
    return kv, qkv.split((heads, kv_heads, kv_heads), dim=1), DecodeMetadata(tables, rows, positions)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_attend_to_their_keys_and_append_their_own(shape: tuple) -> None:
    kv, (q, k, v), metadata = random_step(shape)
    before = kv.k[0].clone(), kv.v[0].clone()
    found = CompiledBackend(kv, 8).decode(metadata)(0, q, k, v)
    window = shape[3]
    for row, (entry, position) in enumerate(zip(metadata.rows.tolist(), metadata.positions.tolist(), strict=True)):
        pages, end = metadata.page_tables[0, entry], position + 1
        start = 0 if window is None else max(0, end - window)
        keys, values = (
            torch.cat((old[pages].flatten(0, 1)[:position], new[row : row + 1]))[start:].double().transpose(0, 1)
            for old, new in zip(before, (k, v), strict=True)
        )
        wanted = F.scaled_dot_product_attention(q[row].double().unsqueeze(1), keys, values, enable_gqa=True).flatten()
        assert (found[row].double() - wanted).abs().max() <= 2.0**-8 * wanted.abs().max()
    slots = metadata.page_tables[0][metadata.rows, metadata.positions // PAGE] * PAGE + metadata.positions % PAGE
    for stored, old, new in zip((kv.k_slots[0], kv.v_slots[0]), before, (k, v), strict=True):
        wanted = old.flatten(0, 1)
        wanted[slots] = new
        assert torch.equal(stored, wanted)


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads() -> None:
    def run(rows: slice) -> torch.Tensor:
        kv, (q, k, v), metadata = random_step((9, 3, 64, None))
        part = DecodeMetadata(metadata.page_tables, metadata.rows[rows], metadata.positions[rows])
        return CompiledBackend(kv, 8).decode(part)(0, q[rows], k[rows], v[rows])

    before, whole = torch.get_num_threads(), run(slice(None))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(run(slice(None)), whole)
            assert all(torch.equal(run(slice(row, row + 1))[0], whole[row]) for row in range(5))
    finally:
        torch.set_num_threads(before)


def test_stale_pages_are_not_read() -> None:
    kv, (q, k, v), metadata = random_step((9, 3, 64, None))
    wanted = CompiledBackend(kv, 8).decode(metadata)(0, q, k, v)
    stale, pages, places = random_step((9, 3, 64, None))[0], metadata.page_tables[0][metadata.rows], metadata.positions
    kept = [page for row, place in zip(pages, places.tolist(), strict=True) for page in row[: place // PAGE + 1]]
    unused = torch.ones(len(stale.k[0]), dtype=torch.bool)
    unused[torch.stack(kept)] = False
    for one in (stale.k[0], stale.v[0]):
        one[unused] = float("nan")
        one[pages[0, 0], 1:] = float("nan")  # row 0 has one token
    assert torch.equal(CompiledBackend(stale, 8).decode(metadata)(0, q, k, v), wanted)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("positions", PAGE * WIDTH, "a position beyond its page table"),
        ("positions", -1, "a position beyond its page table"),
        ("rows", ENTRIES, "a row without a page table"),
        ("page_tables", 1000, "a page that doesn't exist"),
    ],
)
def test_memory_outside_the_cache_is_refused(name: str, value: int, reason: str) -> None:
    kv, (q, k, v), metadata = random_step((9, 3, 64, None))
    getattr(metadata, name).view(-1)[0] = value  # entry 0 is row 2's
    with pytest.raises(RuntimeError, match=reason):
        CompiledBackend(kv, 8).decode(metadata)(0, q, k, v)


def test_it_is_chosen_where_it_computes() -> None:
    def chosen(spec, dtype=torch.bfloat16, stored=None) -> str:
        return choose_backend([spec], dtype, CPU, stored).name

    full = spec_of(3, 64, None)
    assert chosen(full) == chosen(spec_of(3, 64, 100)) == "compiled"
    sizes = {"kv_heads": 3, "head_dim": 64}
    assert chosen(full, torch.float32) == "sdpa"
    assert chosen(full, stored=torch.float8_e4m3fn) == "sdpa"
    assert chosen(spec_of(3, 40, None)) == "sdpa"
    assert chosen(FullAttentionSpec(**sizes, softcap=30.0)) == "sdpa"
    assert chosen(FullAttentionSpec(**sizes, sinks=True)) == "sdpa"
