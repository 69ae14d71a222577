"""Decode attention over a paged KV cache inside a CUDA graph: µs a call, beside the memory floor and FlashInfer.

    python -m benchmarks kernels.attention_decode --json FILE [--markdown FILE] [--heads 28/4,32/8] [--batches 1,64]
        [--keys 512,3000] [--mixes 2000] [--sweep] [--no-flashinfer] [--quick]

A row has as many keys as --keys says, or in a mix a random number of them: lognormal with a sigma of 1. Each graph
holds several calls that read different pages of a pool larger than the L2 cache; times are medians over replays,
divided by the calls. The floor is bytes of keys and values over --bandwidth. FlashInfer compiles at first use unless
its kernels are prebuilt: --no-flashinfer leaves it out.
"""

from __future__ import annotations

import argparse
import math
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
MAX_KEYS = 32768
MAX_BYTES = 4 << 30
"""Largest keys and values of a call; larger ones are left out."""

HEADS = "28/4,32/8,40/8,64/8,16/16,32/32"
QUICK = {"heads": [(16, 8)], "batches": [1, 32, 256], "keys": [512], "mixes": []}
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
    lengths: list[int]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: list[torch.Tensor]
    positions: torch.Tensor
    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        return call_bytes(self.lengths, self.kv_heads)


def call_bytes(lengths: Sequence[int], kv_heads: int) -> int:
    """Bytes of the keys and values that a call reads."""
    return sum(lengths) * kv_heads * DIM * 2 * DTYPE.itemsize


def lognormal(batch: int, mean: int) -> list[int]:
    """Return random lengths, the same in every run."""
    normal = torch.randn(batch, generator=torch.Generator().manual_seed(0))
    return (normal + math.log(mean) - 0.5).exp().clamp(16, MAX_KEYS).long().tolist()


def make_case(heads: int, kv_heads: int, lengths: list[int], context: int) -> Case:
    """Row i has lengths[i] keys; page tables are `context` keys wide, as a server's would be."""
    batch, row_pages = len(lengths), [-(-length // PAGE) for length in lengths]
    in_pool = POOL_BYTES // call_bytes(lengths, kv_heads)
    calls = max(4, min(MAX_CALLS, in_pool))
    copies = max(1, min(calls, in_pool))
    pages = 1 + copies * sum(row_pages)
    k_cache = torch.randn(pages, PAGE, kv_heads, DIM, device="cuda", dtype=DTYPE)
    order = iter((1 + torch.randperm(pages - 1)).split(row_pages * copies))
    tables = torch.zeros(copies, batch, max(context, *lengths) // PAGE + 1, dtype=torch.int64)
    for table in tables:
        for row, count in enumerate(row_pages):
            table[row, :count] = next(order)
    tables = tables.cuda()
    fused = torch.randn(batch, heads + 2 * kv_heads, DIM, device="cuda", dtype=DTYPE)
    return Case(
        heads, kv_heads, lengths, k_cache, torch.randn_like(k_cache), [tables[i % copies] for i in range(calls)],
        torch.tensor(lengths, device="cuda") - 1,
        fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :],
    )  # fmt: skip


def error_of_first_row(case: Case, out: torch.Tensor) -> float:
    """Relative error of row 0 against float64 attention over its pages."""
    keys = case.lengths[0]
    table = case.tables[0][0, : -(-keys // PAGE)]
    k, v = (cache[table].reshape(-1, case.kv_heads, DIM)[:keys].double() for cache in (case.k_cache, case.v_cache))
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
        raise RuntimeError(
            f"wrong attention: relative error {error} at {case.batch} rows of {case.lengths[:4]}, {options}"
        )
    return {way: graph_us([call(table, way) for table in case.tables]) for way in ways}


def time_flashinfer(case: Case, scratch: torch.Tensor) -> tuple[float, bool]:
    """Microseconds per call of FlashInfer's batch decode, planned on the host, and whether that was on tensor cores."""
    import flashinfer

    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    row_pages = (lengths + PAGE - 1) // PAGE
    indptr = torch.nn.functional.pad(row_pages.cumsum(0), (1, 0)).int().cuda()
    last = (lengths - (row_pages - 1) * PAGE).int().cuda()
    found = []
    # its plain kernels hold small groups only
    for tensor_cores in (True, False) if case.heads == 2 * case.kv_heads else (True,):
        calls = []
        for table in case.tables:
            indices = torch.cat([row[:count] for row, count in zip(table, row_pages.tolist(), strict=True)]).int()
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
        heads, kv_heads, batch, keys = shape
        case = make_case(heads, kv_heads, [keys] * batch, context)
        tried = []
        for tiling in SWEEP_TILINGS:
            for splits in SWEEP_SPLITS:
                if splits * tiling[0] > 2 * keys or case.batch * splits > 512:
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
        print(f"sweep batch {batch} keys {keys}: {best}", flush=True)
        del case
    return rows


def head_counts(text: str) -> list[tuple[int, int]]:
    """Convert an argument such as 28/4,32/8 to pairs of query and KV heads."""
    pairs = [tuple(map(harness.count, part.split("/"))) for part in text.split(",")]
    if any(len(pair) != 2 or pair[0] % pair[1] for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 28/4,32/8: query heads / KV heads, a multiple of them")
    return [(pair[0], pair[1]) for pair in pairs]


def markdown(rows: Sequence[dict], batches: Sequence[int]) -> str:
    """Return a table of the shares of the floor: a line for each head layout and length, a column for each batch."""
    lines = ["| heads | keys | " + " | ".join(map(str, batches)) + " |", "|---|---|" + "---|" * len(batches)]
    cells = {(row["heads"], row["kv_heads"], row["keys"], row["batch"]): row["fraction_of_floor"] for row in rows}
    for heads, kv_heads, keys in dict.fromkeys(key[:3] for key in cells):
        shares = [cells.get((heads, kv_heads, keys, batch)) for batch in batches]
        texts = ["–" if share is None else f"{share:.2f}" for share in shares]
        lines.append(f"| {heads} over {kv_heads} | {keys} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the floor (default: a copy's, measured)")
    parser.add_argument("--context", type=harness.count, default=MAX_KEYS, help="keys that a page table has room for")
    parser.add_argument("--heads", type=head_counts, default=head_counts(HEADS), help=f"query/KV heads ({HEADS})")
    parser.add_argument("--batches", type=harness.counts, default=[1, 8, 32, 96, 256], help="rows")
    parser.add_argument("--keys", type=harness.counts_from_zero, default=[512, 3000, 12000, 32000], help="keys a row")
    parser.add_argument("--mixes", type=harness.counts_from_zero, default=[2000], help="mean keys of random lengths")
    parser.add_argument("--markdown", type=harness.output_file, metavar="FILE", help="write a table of the shares")
    parser.add_argument("--no-flashinfer", action="store_true", help="leave FlashInfer out")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles and split counts")
    parser.add_argument("--quick", action="store_true", help="16 heads over 8, 512 keys, three batches")
    args = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    torch.manual_seed(0)
    bandwidth = args.bandwidth or copy_bandwidth()
    flashinfer_error = "left out" if args.no_flashinfer else None
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    if args.quick:
        vars(args).update(QUICK)
    shapes = [
        (heads, kv_heads, name, lengths)
        for heads, kv_heads in args.heads
        for name, length_of in [
            *((str(keys), lambda batch, keys=keys: [keys] * batch) for keys in args.keys if keys),
            *((f"mix of {mean}", lambda batch, mean=mean: lognormal(batch, mean)) for mean in args.mixes if mean),
        ]
        for lengths in map(length_of, args.batches)
        if call_bytes(lengths, kv_heads) <= MAX_BYTES
    ]
    for heads, kv_heads, name, lengths in shapes:
        case = make_case(heads, kv_heads, lengths, args.context)
        floor = case.bytes / bandwidth / 1e3
        row = {"heads": heads, "kv_heads": kv_heads, "batch": case.batch, "keys": name}
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
    if args.markdown is not None:
        args.markdown.write_text(markdown(report.rows, args.batches))
    if flashinfer_error:
        print(f"FlashInfer: {flashinfer_error}")
    report.finish(**figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
