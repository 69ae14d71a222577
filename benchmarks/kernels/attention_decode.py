"""Decode attention over a paged KV cache inside a CUDA graph: µs a call, beside the memory floor and FlashInfer.

    python -m benchmarks kernels.attention_decode --json FILE [--sweep] [--no-flashinfer] [--quick]

Each graph holds several calls that read different pages of a pool larger than the L2 cache; times are medians over
replays, divided by the calls. The floor is bytes of keys and values over --bandwidth. FlashInfer compiles at first use
unless its kernels are prebuilt: --no-flashinfer leaves it out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import harness
from benchmarks.timing import copy_bandwidth, graph_us

NEEDS = "1 GPU"
PAGE = 16
DIM = 128
DTYPE = torch.bfloat16
POOL_BYTES = 512 << 20
MAX_CALLS = 64
SHAPES = [(16, 8, batch, keys) for keys in (512, 2048) for batch in (1, 8, 32, 128, 256)] + [
    (32, 8, batch, keys) for keys in (512, 2048) for batch in (1, 8, 32, 128, 256)
]
QUICK_SHAPES = [(16, 8, 1, 512), (16, 8, 32, 512), (16, 8, 256, 512)]
SWEEP_SHAPES = [(16, 8, batch, 608) for batch in (1, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256)] + [
    (16, 8, batch, 2048) for batch in (8, 32, 64, 128)
]
SWEEP_TILINGS = [(32, 1, 2), (32, 1, 3), (32, 1, 4)]
SWEEP_SPLITS = [1, 2, 4, 8, 16, 32]


@dataclass
class Case:
    """One shape: a pool of pages in random order and one page table per call of the graph."""

    heads: int
    kv_heads: int
    batch: int
    keys: int
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: list[torch.Tensor]
    positions: torch.Tensor
    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor

    @property
    def bytes(self) -> int:
        return self.batch * self.keys * self.kv_heads * DIM * 2 * DTYPE.itemsize


def make_case(heads: int, kv_heads: int, batch: int, keys: int, context: int) -> Case:
    """Every row has `keys` keys; page tables are `context` keys wide, as a server's would be."""
    row_pages = keys // PAGE
    call_bytes = batch * keys * kv_heads * DIM * 2 * DTYPE.itemsize
    calls = max(4, min(MAX_CALLS, POOL_BYTES // call_bytes))
    copies = max(1, min(calls, POOL_BYTES // call_bytes))
    pages = 1 + copies * batch * row_pages
    k_cache = torch.randn(pages, PAGE, kv_heads, DIM, device="cuda", dtype=DTYPE)
    order = 1 + torch.randperm(pages - 1, device="cuda").view(copies, batch, row_pages)
    tables = torch.zeros(copies, batch, max(context, keys) // PAGE, dtype=torch.int64, device="cuda")
    tables[:, :, :row_pages] = order
    fused = torch.randn(batch, heads + 2 * kv_heads, DIM, device="cuda", dtype=DTYPE)
    return Case(
        heads, kv_heads, batch, keys, k_cache, torch.randn_like(k_cache), [tables[i % copies] for i in range(calls)],
        torch.full((batch,), keys - 1, device="cuda"),
        fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :],
    )  # fmt: skip


def error_of_first_row(case: Case, out: torch.Tensor) -> float:
    """Relative error of row 0 against float64 attention over its pages."""
    table = case.tables[0][0, : case.keys // PAGE]
    k, v = (cache[table].reshape(-1, case.kv_heads, DIM).double() for cache in (case.k_cache, case.v_cache))
    q = case.q[0].double().view(case.kv_heads, -1, DIM)
    weights = (torch.einsum("kgd,nkd->kgn", q, k) * DIM**-0.5).softmax(-1)
    wanted = torch.einsum("kgn,nkd->kgd", weights, v).reshape(-1, DIM)
    return float((out[0].double() - wanted).norm() / wanted.norm())


def time_triton(case: Case, ways: tuple[str, ...], num_splits=None, tiling=None) -> dict[str, float]:
    """Microseconds per call: 'decode', 'fused' (with the append of the step's keys and values)."""
    from engine.kernels import paged_decode as td

    options = {"num_splits": num_splits, "tiling": tiling}
    workspace = td.decode_workspace(case.q, case.k_cache, case.tables[0], **options)
    out = torch.empty(case.batch, case.heads, DIM, device="cuda", dtype=DTYPE)
    new_kv = (case.k_new, case.v_new)

    def call(table: torch.Tensor, way: str) -> Callable[[], object]:
        def run() -> None:
            td.paged_decode(
                case.q, case.k_cache, case.v_cache, table, case.positions, DIM**-0.5,
                new_kv=new_kv if way == "fused" else None, out=out, workspace=workspace, **options,
            )  # fmt: skip

        return run

    out.fill_(float("nan"))
    call(case.tables[0], ways[0])()
    error = error_of_first_row(case, out)
    if not error < 2e-2:
        raise RuntimeError(f"wrong attention: relative error {error} at {case.batch} x {case.keys}, {options}")
    return {way: graph_us([call(table, way) for table in case.tables]) for way in ways}


def time_flashinfer(case: Case, scratch: torch.Tensor) -> tuple[float, bool]:
    """Microseconds per call of FlashInfer's batch decode, planned on the host, and whether that was on tensor cores."""
    import flashinfer

    row_pages = case.keys // PAGE
    indptr = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * row_pages
    last = torch.full((case.batch,), PAGE, dtype=torch.int32, device="cuda")
    found = []
    # its plain kernels hold small groups only
    for tensor_cores in (True, False) if case.heads == 2 * case.kv_heads else (True,):
        calls = []
        for table in case.tables:
            indices = table[:, :row_pages].reshape(-1).int()
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                scratch, "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores,
                paged_kv_indptr_buffer=indptr.clone(), paged_kv_indices_buffer=indices.clone(),
                paged_kv_last_page_len_buffer=last.clone(),
            )  # fmt: skip
            wrapper.plan(
                indptr, indices, last, case.heads, case.kv_heads, DIM, PAGE, q_data_type=DTYPE, kv_data_type=DTYPE
            )
            calls.append(lambda wrapper=wrapper: wrapper.run(case.q, (case.k_cache, case.v_cache)))
        found.append((graph_us(calls), tensor_cores))
    return min(found)


def sweep(context: int) -> list[dict]:
    """Time every tiling and split count on a few shapes; a combination that can't run is recorded with its error."""
    from engine.kernels import paged_decode as td

    rows = []
    for shape in SWEEP_SHAPES:
        case = make_case(*shape, context)
        tried = []
        for tiling in SWEEP_TILINGS:
            for splits in SWEEP_SPLITS:
                if splits * tiling[0] > 2 * case.keys or case.batch * splits > 512:
                    continue
                row = {"shape": shape, "tiling": tiling, "splits": splits}
                try:
                    row["us"] = round(time_triton(case, ("fused",), splits, td.Tiling(*tiling))["fused"], 2)
                    tried.append(row)
                except Exception as error:  # a tile beyond the shared memory: the sweep goes on without it
                    row["error"] = f"{type(error).__name__}: {error}"[:200]
                rows.append(row)
        tried.sort(key=lambda row: row["us"])
        best = "  ".join(f"{row['tiling']}x{row['splits']}={row['us']}" for row in tried[:5])
        print(f"sweep batch {case.batch} keys {case.keys}: {best}", flush=True)
        del case
    return rows


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the floor (default: a copy's, measured)")
    parser.add_argument("--context", type=harness.count, default=4096, help="keys that a page table has room for")
    parser.add_argument("--no-flashinfer", action="store_true", help="leave FlashInfer out")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles and split counts")
    parser.add_argument("--quick", action="store_true", help="three shapes only")
    args = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    torch.manual_seed(0)
    bandwidth = args.bandwidth or copy_bandwidth()
    flashinfer_error = "left out" if args.no_flashinfer else None
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for shape in QUICK_SHAPES if args.quick else SHAPES:
        case = make_case(*shape, args.context)
        floor = case.bytes / bandwidth / 1e3
        row = {"heads": case.heads, "kv_heads": case.kv_heads, "batch": case.batch, "keys": case.keys}
        row |= {"floor_us": round(floor, 2)} | {
            f"{way}_us": round(us, 2) for way, us in time_triton(case, ("decode", "fused")).items()
        }
        row["fraction_of_floor"] = round(floor / row["fused_us"], 3)
        if flashinfer_error is None:
            try:
                us, tensor_cores = time_flashinfer(case, scratch)
                row |= {"flashinfer_us": round(us, 2), "flashinfer_tensor_cores": tensor_cores}
            except Exception as error:  # a peer that can't run here is reported and left out of the other shapes
                flashinfer_error = f"{type(error).__name__}: {error}"[:300]
        report.add(row)
        del case
    figures = {"dtype": str(DTYPE), "page_size": PAGE, "head_dim": DIM, "bandwidth_gb_per_s": round(bandwidth, 1),
               "flashinfer_error": flashinfer_error}  # fmt: skip
    if args.sweep:
        figures["sweep"] = sweep(args.context)
    if flashinfer_error:
        print(f"FlashInfer: {flashinfer_error}")
    report.finish(**figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
