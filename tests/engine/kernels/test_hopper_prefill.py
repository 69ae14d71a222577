"""Prefill attention for Hopper GPUs against float64 and the kernels of all GPUs."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.kernels import DTYPE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.kernels.launch import has_hopper_kernels

if INTERPRETED or not has_hopper_kernels(torch.device("cuda", 0), DTYPE, 128, 16):
    pytest.skip("needs a GPU with compute capability 9.0 and Triton 3.6 or 3.7", allow_module_level=True)

from engine.kernels.hopper_prefill import error_beside_torch, hopper_prefill, tile_list
from engine.kernels.paged_prefill import VarlenLayout, append_kv, paged_prefill

pytestmark = pytest.mark.gpu


class Step:
    """Random queries and caches of some chunks of (start, length), and their layout."""

    def __init__(
        self, chunks, heads, kv_heads, dim, page_size=16, dtype=DTYPE, padding=0, spare_chunks=0, pages_each=0
    ):
        pages_each = pages_each or -(-max(start + length for start, length in chunks) // page_size)
        count = len(chunks)
        self.caches = [
            torch.randn(count * pages_each + 1, page_size, kv_heads, dim, device="cuda", dtype=dtype) for _ in "kv"
        ]
        self.table = torch.zeros(count + spare_chunks + 1, pages_each, dtype=torch.int64, device="cuda")
        self.table[1 : count + 1] = 1 + torch.randperm(count * pages_each, device="cuda").view(count, pages_each)
        lengths = torch.tensor([length for _, length in chunks])
        ends = lengths.cumsum(0).tolist()
        self.used, self.tokens = ends[-1], ends[-1] + padding
        ends += [ends[-1]] * spare_chunks
        starts = [start for start, _ in chunks] + [0] * spare_chunks
        rows = torch.repeat_interleave(torch.arange(1, count + 1), lengths)
        positions = torch.cat([torch.arange(start, start + length) for start, length in chunks])
        fill = torch.zeros(padding, dtype=torch.int64)
        self.layout = VarlenLayout(
            *(
                part.cuda()
                for part in (
                    torch.cat([positions, fill]),
                    torch.cat([rows, fill]),
                    torch.tensor(ends),
                    torch.tensor(starts),
                    torch.arange(1, count + spare_chunks + 1),
                )
            )
        )
        projected = torch.randn(self.tokens, kv_heads, heads // kv_heads + 2, dim, device="cuda", dtype=dtype)
        self.q, self.scale = projected[:, :, :-2], dim**-0.5
        self.k, self.v = projected[:, :, -2], projected[:, :, -1]
        self.shape = (self.tokens, heads * dim)

    def run(self, tiles=None, **options):
        out = torch.full(self.shape, float("nan"), device="cuda", dtype=self.q.dtype)
        tiles = tile_list(self.layout, self.tokens, self.q.shape[2]) if tiles is None else tiles
        return hopper_prefill(self.q, *self.caches, self.table, tiles, self.scale, out, **options)

    def expected(self, **options):
        out = torch.full(self.shape, float("nan"), device="cuda", dtype=self.q.dtype)
        return paged_prefill(self.q, *self.caches, self.table, self.layout, self.scale, out, **options)


def random_chunks(rng):
    return [(rng.choice([0, 0, rng.randint(1, 900)]), rng.randint(1, 500)) for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("seed", range(12))
def test_random_chunks_equal_the_other_kernel(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads, kv_heads = rng.choice([(32, 8), (16, 8), (8, 8), (12, 2), (40, 8), (9, 3), (4, 1)])
    step = Step(
        random_chunks(rng), heads, kv_heads, rng.choice([64, 128]), rng.choice([8, 16, 32, 64, 128]),
        rng.choice([torch.bfloat16, torch.float16]), padding=rng.choice([0, 7, 300]), spare_chunks=rng.choice([0, 5]),
    )  # fmt: skip
    found, wanted = step.run(), step.expected()
    assert found[: step.used].isfinite().all()
    assert relative_error(found[: step.used], wanted[: step.used]) < 5e-3
    assert found[step.used :].isnan().all(), "rows of padding tokens are not written"


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 16, 100, 128, 129, 300, 5000])
def test_windows_and_sinks_equal_the_other_kernel(window, sinks):
    rng = random.Random(window or 0)
    torch.manual_seed(rng.randrange(1000))
    for heads, kv_heads, dim, page_size in ((32, 8, 128, 16), (64, 8, 64, 16), (9, 3, 64, 128)):
        step = Step([*random_chunks(rng), (1500, 300), (0, 1)], heads, kv_heads, dim, page_size)
        options = {"window": window}
        if sinks:
            options["sinks"] = 3 * torch.randn(heads, device="cuda", dtype=DTYPE)
        found, wanted = step.run(**options), step.expected(**options)
        assert found.isfinite().all()
        assert relative_error(found, wanted) < 5e-3
        assert relative_error(found, step.expected()) > 1e-2 or not sinks and window in (None, 5000)


def test_pages_behind_the_window_are_not_read():
    step = Step([(900, 150), (300, 40), (0, 20)], 32, 8, 128)
    wanted = step.expected(window=200)
    for row, start in ((1, 900), (2, 300)):
        behind = (start + 1 - 200) // 16
        for cache in step.caches:
            cache[step.table[row, :behind]] = float("nan")
        step.table[row, :behind] = 0  # freed: the scratch page
    for cache in step.caches:
        cache[0] = float("nan")
    assert relative_error(step.run(window=200), wanted) < 5e-3


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (150, False), (150, True), (None, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"), [(32, 8, 128, 16), (16, 8, 128, 16), (9, 3, 64, 32)]
)
def test_small_step_equals_float64(heads, kv_heads, dim, page_size, window, sinks):
    assert error_beside_torch(heads, kv_heads, dim, page_size, DTYPE, window=window, sinks=sinks) < 5e-3


def test_results_do_not_depend_on_the_run():
    step = Step([(0, 700), (300, 333), (0, 64)] * 3, 32, 8, 128)
    first = step.run()
    assert all(torch.equal(step.run(), first) for _ in range(20))


def test_values_after_the_newest_token_do_not_matter():
    """Appending zeroes them, so that whatever an aborted request left there has no effect."""
    chunks = [(0, 37), (20, 100), (256, 3)]
    step = Step(chunks, 32, 8, 128)
    for row, (start, length) in enumerate(chunks, 1):
        for cache in step.caches:
            cache.view(-1, *cache.shape[2:])[
                [
                    int(step.table[row, place // 16]) * 16 + place % 16
                    for place in range(start + length, -(-(start + length) // 16) * 16)
                ]
            ] = float("nan")
    append_kv(step.k, step.v, *step.caches, step.table, step.layout.token_slots, step.layout.positions)
    assert step.run().isfinite().all()


def test_captured_graph_follows_the_layout():
    chunks = [[(0, 300), (10, 200), (0, 12)], [(128, 24), (0, 400), (500, 88)], [(0, 1), (0, 1), (600, 510)]]
    steps = [Step(each, 16, 8, 128, pages_each=70) for each in chunks]
    static = steps[0]
    graph = torch.cuda.CUDAGraph()
    static.run()
    with torch.cuda.graph(graph):
        out = static.run()
    for step in steps:
        wanted = step.expected()
        for target, source in zip(
            (*static.layout, static.table, *static.caches, static.q),
            (*step.layout, step.table, *step.caches, step.q),
            strict=True,
        ):
            target.copy_(source)
        graph.replay()
        assert relative_error(out, wanted) < 5e-3


def test_no_chunks_write_nothing():
    step = Step([(0, 5)], 16, 8, 128)
    step.layout.ends.zero_()
    assert step.run().isnan().all()


def test_mismatches_are_refused_by_name():
    step = Step([(0, 40)], 16, 8, 128)
    tiles, out = tile_list(step.layout, 40, 2), torch.empty(step.shape, device="cuda", dtype=DTYPE)
    with pytest.raises(ValueError, match="one dtype"):
        hopper_prefill(step.q.half(), *step.caches, step.table, tiles, 1.0, out)
    with pytest.raises(ValueError, match="out must be contiguous"):
        hopper_prefill(step.q, *step.caches, step.table, tiles, 1.0, out[:, 1:])
    with pytest.raises(ValueError, match="caches must be contiguous"):
        hopper_prefill(step.q, step.caches[0][::2], step.caches[1][::2], step.table, tiles, 1.0, out)
