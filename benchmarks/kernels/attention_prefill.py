"""Prefill attention over a paged KV cache inside a CUDA graph: µs a call and TFLOP/s.

    python -m benchmarks kernels.attention_prefill --json FILE [--sweep] [--rounds 5]

Kernels take turns: `paged`, of every GPU; `hopper`, where the GPU and Triton support it; FlashInfer's `fa3`, where
FlashInfer can be imported.

Bf16, head size 128, pages of 16 tokens in random order. A shape is query heads, KV heads, and for each chunk how many
tokens come before it and how many it has. Work above the diagonal is not counted. Each result is first compared with
attention in float64.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import harness
from benchmarks.kernels.attention_decode import DIM, DTYPE, PAGE
from benchmarks.timing import graph_us

if find_spec("triton"):  # PyTorch for CPUs comes without it, and --help works there
    from engine.kernels.launch import has_hopper_kernels
    from engine.kernels.paged_prefill import Tile, VarlenLayout, choose_tile, paged_prefill

NEEDS = "1 GPU"
CALLS = 8  # in one graph
SHAPES = [
    (heads, 8, chunks)
    for heads in (16, 32)
    for chunks in ([(0, 512)], [(0, 16384)], [(0, 1024)] * 8, [(0, 128)] * 16, [(3072, 1024)], [(16384, 4096)])
]
SWEEP = [
    (rows, pack, warps, stages)
    for rows, warps in ((64, 4), (128, 8), (128, 4))
    for pack in (1, 2, 4)
    for stages in (2, 3, 4)
]


class Case:
    """Queries, pages and packing of one shape."""

    def __init__(self, heads: int, kv_heads: int, chunks: list[tuple[int, int]]):
        self.heads, self.kv_heads, self.chunks = heads, kv_heads, chunks
        pages_each = -(-max(start + length for start, length in chunks) // PAGE)
        pages = len(chunks) * pages_each
        self.k_cache = torch.randn(pages + 1, PAGE, kv_heads, DIM, device="cuda", dtype=DTYPE)
        self.v_cache = torch.randn_like(self.k_cache)
        self.table = torch.zeros(len(chunks) + 1, pages_each, dtype=torch.int64, device="cuda")
        self.table[1:] = (1 + torch.randperm(pages, device="cuda")).view(len(chunks), pages_each)
        lengths = torch.tensor([length for _, length in chunks])
        tokens = int(lengths.sum())
        projected = torch.randn(tokens, kv_heads * (heads // kv_heads + 2), DIM, device="cuda", dtype=DTYPE)
        self.q = projected[:, :heads].unflatten(1, (kv_heads, heads // kv_heads))
        self.out = torch.empty(tokens, heads * DIM, device="cuda", dtype=DTYPE)
        places = torch.cat([torch.arange(start, start + length) for start, length in chunks])
        rows = torch.repeat_interleave(torch.arange(1, len(chunks) + 1), lengths)
        starts = torch.tensor([start for start, _ in chunks])
        self.packing = VarlenLayout(
            *(part.cuda() for part in (places, rows, lengths.cumsum(0), starts, torch.arange(1, len(chunks) + 1)))
        )

    @property
    def flops(self) -> int:
        """Of both products, up to the diagonal."""
        pairs = sum(length * start + length * (length + 1) // 2 for start, length in self.chunks)
        return 4 * DIM * self.heads * pairs

    def run(self, tile: Tile | None = None) -> None:
        paged_prefill(self.q, self.k_cache, self.v_cache, self.table, self.packing, DIM**-0.5, self.out, tile)

    def kernels(self) -> dict[str, Callable[[], object]]:
        """Return the calls to compare, by name. Each writes `out`."""
        found: dict[str, Callable[[], object]] = {"paged": self.run}
        if has_hopper_kernels(self.q.device, DTYPE, DIM, PAGE):
            from engine.kernels.hopper_prefill import hopper_prefill, tile_list

            tiles = tile_list(self.packing, len(self.q), self.q.shape[2])
            caches, scale = (self.k_cache, self.v_cache), DIM**-0.5
            found["hopper"] = lambda: hopper_prefill(self.q, *caches, self.table, tiles, scale, self.out)
        if find_spec("flashinfer"):
            found["flashinfer"] = self._flashinfer()
        return found

    def _flashinfer(self) -> Callable[[], object]:
        import flashinfer

        space = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa3")
        ends = torch.tensor([start + length for start, length in self.chunks], device="cuda")
        pages = -(-ends // PAGE)
        first = lambda counts: torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()  # noqa: E731
        lengths = torch.tensor([length for _, length in self.chunks], device="cuda")
        rows = [self.table[row, :count] for row, count in enumerate(pages.tolist(), 1)]
        wrapper.plan(
            first(lengths), first(pages), torch.cat(rows).int(), ((ends - 1) % PAGE + 1).int(), self.heads,
            self.kv_heads, DIM, PAGE, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE,
        )  # fmt: skip
        q, out = self.q.flatten(1, 2).contiguous(), self.out.view(-1, self.heads, DIM)
        return lambda: wrapper.run(q, (self.k_cache, self.v_cache), out=out)

    def error(self) -> float:
        """Relative error of the last chunk's last 64 tokens against float64."""
        start, length = self.chunks[-1]
        count, stop = min(64, length), start + length
        table = self.table[-1]
        k, v = (cache[table].reshape(-1, self.kv_heads, DIM)[:stop].double() for cache in (self.k_cache, self.v_cache))
        scores = torch.einsum("qkgd,nkd->kgqn", self.q[-count:].double(), k) * DIM**-0.5
        place = torch.arange(stop - count, stop, device="cuda")
        hidden = torch.arange(stop, device="cuda")[None] > place[:, None]
        wanted = torch.einsum("kgqn,nkd->qkgd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        found = self.out[-count:].double().view_as(wanted)
        return float((found - wanted).norm() / wanted.norm())


def check(case: Case, name: str, call: Callable[[], object]) -> None:
    """Raise if the result of a call is wrong."""
    case.out.fill_(float("nan"))
    call()
    error = case.error()
    if not error < 2e-2:
        raise RuntimeError(f"wrong attention: relative error {error} of {name} at {case.heads} heads, {case.chunks}")


def figures(case: Case, us: float) -> dict[str, Any]:
    """Return microseconds a call, and the rate."""
    return {"us": round(us, 2), "tflops": round(case.flops / us / 1e6, 1)}


def measured(case: Case, tile: Tile) -> dict[str, Any]:
    """Time the kernel of every GPU with this tile."""
    check(case, str(tile), lambda: case.run(tile))
    return figures(case, graph_us([lambda: case.run(tile)] * CALLS))


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--rounds", type=harness.count, default=3)
    parser.add_argument("--sweep", action="store_true", help="also time other tiles")
    args = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    torch.manual_seed(0)
    for heads, kv_heads, chunks in SHAPES:
        case = Case(heads, kv_heads, chunks)
        row = {
            "heads": heads,
            "kv_heads": kv_heads,
            "chunks": f"{len(chunks)} x {chunks[0]}",
            "tile": choose_tile(len(case.q), heads, heads // kv_heads, DIM),
        }
        calls = case.kernels()
        for name, call in calls.items():
            check(case, name, call)
        times = harness.alternate(
            {name: lambda call=call: graph_us([call] * CALLS) for name, call in calls.items()}, args.rounds
        )
        for name, taken in times.items():
            found = figures(case, statistics.median(taken))
            row |= {f"{name}_us": found["us"], f"{name}_tflops": found["tflops"]}
        if args.sweep:
            row["sweep"] = []
            for tile in (Tile(*sizes) for sizes in SWEEP):
                if tile.pack > heads // kv_heads:
                    continue
                try:
                    row["sweep"].append({"tile": tile, **measured(case, tile)})
                except Exception as error:  # a tile beyond the shared memory: the sweep goes on without it
                    row["sweep"].append({"tile": tile, "error": f"{type(error).__name__}: {error}"[:200]})
            row["sweep"].sort(key=lambda one: one.get("us", float("inf")))
        report.add(row)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
