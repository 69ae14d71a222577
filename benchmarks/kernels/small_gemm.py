"""Linear layers with few rows (small GEMMs): our kernels' launch parameters beside cuBLAS, µs a layer.

    python -m benchmarks kernels.small_gemm --shapes qwen3-0.6b --rows 1,8,32 --json FILE

Each figure is one CUDA graph of 24 layers with separate weights (more than the L2 cache holds), so weights come
from memory as they do in a model, and launches overlap as they do there. The floor is the weights' bytes over
--bandwidth. chosen_us is the variant that the engine picks.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from benchmarks.shapes import SHAPES, shape_config
from benchmarks.timing import copy_bandwidth, graph_us
from engine.kernels.launch import next_power_of_2

if find_spec("triton"):  # PyTorch for CPUs comes without it, and --help works there
    from engine.kernels.linear_weight import LinearWeight
    from engine.kernels.small_batch_gemm import WIDE, LaunchConfig, Scratch, choose_config, linear, suits_library

NEEDS = "1 GPU"
LAYERS = 24


class Case(NamedTuple):
    """One product of a model: y [M, n] = x [M, k] Wᵀ with what belongs to its launch."""

    name: str
    n: int
    k: int
    norm: bool = False
    gated: bool = False
    add: bool = False
    best: bool = False


def cases(shape: str) -> list[Case]:
    """Return the linear layers of a model shape, each with the norm, gate, sum or argmax that its kernel includes."""
    config = shape_config(shape)
    hidden, middle, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return [
        Case("qkv", (heads + 2 * kv_heads) * dim, hidden, norm=True),
        Case("o", hidden, heads * dim, add=True),
        Case("gate_up", middle, hidden, norm=True, gated=True),
        Case("down", hidden, middle, add=True),
        Case("head", config["vocab_size"], hidden, norm=True, best=True),
    ]


def candidates(case: Case, rows: int) -> list[LaunchConfig]:
    """Launch parameters worth trying, what the engine would choose among them."""
    found: list[LaunchConfig] = (
        [] if suits_library(rows, case.n, case.k, case.gated) else [choose_config(rows, case.n, case.k, case.gated)]
    )
    big = case.n > 50000
    if rows <= 8:
        for bn, bk, warps in itertools.product((2, 4, 8, 16, 32), (512, 1024, 2048, 4096), (4, 8)):
            if bk > max(1024, case.k) or not 4096 <= bn * bk <= 32768 or (big and bn < 8):
                continue
            if rows > 1 and (bn * bk * (2 if case.gated else 1) > 2048 * warps or -(-case.k // bk) * rows > 24):
                continue  # spills, or compiles for minutes
            found.append(LaunchConfig(0, bn, bk, 1, warps, 1))
    if rows == 1:
        return list(dict.fromkeys(found))
    full = max(16, next_power_of_2(rows))
    tiles = [full] if full <= 64 else [size for size in (64, 128, 256) if size <= full]
    for padded, bn, bk, splits, warps, stages in itertools.product(
        tiles, (64, 128), (64, 128, 256), (1, 2, 4), (4, 8), (3, 5)
    ):
        steps = case.k // bk // splits
        if case.k % (bk * splits) or (big and splits > 1) or (steps <= 2 and stages > 3) or (warps == 8 and bn < 128):
            continue
        if (stages + 1) * (bn * (2 if case.gated else 1) + padded) * bk * 2 > 225_000 and steps > 1:
            continue
        if bn * padded * (2 if case.gated else 1) > 128 * 32 * warps:  # accumulators of 128 registers a thread
            continue
        programs = -(-case.n // bn) * splits * -(-rows // padded)
        if programs < 60 or programs > 2000 and splits > 1:
            continue
        found.append(LaunchConfig(padded, bn, bk, splits, warps, stages))
    return list(dict.fromkeys(found))


def launch(case: Case, pick: LaunchConfig, buffers: dict[str, Any], layer: int) -> None:
    """One layer's product as the engine would launch it with this tile."""
    linear(
        buffers["x"],
        LinearWeight.plain(buffers["w"][layer % len(buffers["w"])]),
        buffers["out"],
        buffers["scratch"],
        norm=buffers["norm"] if case.norm else None,
        eps=1e-6,
        gated=case.gated,
        add=case.add,
        best=case.best,
        pick=pick,
    )


def make_buffers(case: Case, rows: int, layers: int) -> dict[str, Any]:
    torch.manual_seed(0)
    width = case.n * (2 if case.gated else 1)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.05  # noqa: E731
    # the vocabulary's product isn't split: its parts need no room
    widest = case.k if case.n >= WIDE else width
    scratch = Scratch(max(rows, 128), rows, case.k, widest, case.n * 8, torch.bfloat16, torch.device("cuda"))
    return {
        "x": make(rows, case.k),
        "w": [make(width, case.k) for _ in range(layers)],
        "norm": make(case.k) + 1,
        "out": torch.zeros(rows, case.n, device="cuda", dtype=torch.bfloat16),
        "scratch": scratch,
    }


def reference(case: Case, buffers: dict[str, Any]) -> torch.Tensor:
    x = buffers["x"].double()
    if case.norm:
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * buffers["norm"].double()
    y = x @ buffers["w"][0].double().T
    if case.gated:
        y = torch.nn.functional.silu(y[:, : case.n]) * y[:, case.n :]
    return y


def cublas(case: Case, buffers: dict[str, Any]) -> Any:
    functional = torch.nn.functional

    def body(layer: int) -> None:
        x, weight = buffers["x"], buffers["w"][layer % len(buffers["w"])]
        if case.norm:
            x = functional.rms_norm(x, (case.k,), buffers["norm"], 1e-6)
        if case.add:
            buffers["out"].addmm_(x, weight.T)
            return
        y = functional.linear(x, weight)
        if case.gated:
            y = functional.silu(y[:, : case.n]) * y[:, case.n :]
        if case.best:
            y.max(-1)

    return body


def compile_some(job: tuple[str, int, int, int]) -> int:
    """Fill Triton's cache from a separate process: every `stride`-th candidate; how many could be launched."""
    shape, rows, offset, stride = job
    done = 0
    for case in cases(shape):
        buffers = None
        for index, pick in enumerate(candidates(case, rows)):
            if index % stride == offset:
                buffers = buffers or make_buffers(case, rows, 1)
                try:
                    launch(case, pick, buffers, 0)
                    done += 1
                except Exception as problem:  # too much shared memory, say; the results list it as failed too
                    print(f"{case.name} {rows} {pick}: {type(problem).__name__}", flush=True)
    torch.cuda.synchronize()
    return done


def measure(case: Case, rows: int, bandwidth: float) -> dict[str, Any]:
    """One product: floor, cuBLAS and our best variants as [µs, relative error against float64, launch parameters]."""
    layers = 4 if case.n > 50000 else LAYERS
    buffers = make_buffers(case, rows, layers)
    wanted = reference(case, buffers)

    def micros(body: Any) -> float:
        return graph_us([lambda layer=layer: body(layer) for layer in range(layers)], repeats=7)

    floor = sum(w.nbytes for w in buffers["w"]) / layers / bandwidth / 1e3
    found, failed = [], []
    library = micros(cublas(case, buffers))
    for pick in candidates(case, rows):
        try:
            buffers["out"].zero_()
            launch(case, pick, buffers, 0)
            error = ((buffers["out"].double() - wanted).norm() / wanted.norm()).item()
            fast = micros(lambda layer: launch(case, pick, buffers, layer))  # noqa: B023
        except Exception as problem:  # too much shared memory, say: listed as failed
            failed.append([pick, f"{type(problem).__name__}: {problem}"[:100]])
            continue
        found.append([round(fast, 2), round(error, 4), pick])
    found.sort(key=lambda entry: entry[0])
    row: dict[str, Any] = {"rows": rows, "case": case.name, "floor_us": round(floor, 2), "cublas_us": round(library, 2)}
    if suits_library(rows, case.n, case.k, case.gated):
        row["chosen"] = "cublas"
    else:
        chosen = choose_config(rows, case.n, case.k, case.gated)
        row["chosen"] = str(tuple(chosen))
        row["chosen_us"] = next((us for us, _, pick in found if pick == chosen), None)
    return row | {"best_us": found[0][0] if found else None, "tried": len(found), "best": found[:8], "failed": failed}


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--shapes", type=harness.names(SHAPES), default=["qwen3-0.6b"])
    parser.add_argument("--rows", type=harness.counts, default=[1, 8, 32])
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the floor (default: a copy's, measured)")
    parser.add_argument("--processes", type=harness.count, default=min(14, os.cpu_count() or 1), help="that compile")
    args = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    jobs = [
        (shape, rows, offset, args.processes)
        for shape in args.shapes
        for rows in args.rows
        for offset in range(args.processes)
    ]
    # forked processes could not use a GPU that this one has looked at
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        print("compiled", sum(pool.map(compile_some, jobs)), "variants", flush=True)
    bandwidth = args.bandwidth or copy_bandwidth()
    for shape, rows in itertools.product(args.shapes, args.rows):
        for case in cases(shape):
            report.add({"shape": shape} | measure(case, rows, bandwidth))
    columns = ("shape", "rows", "case", "floor_us", "cublas_us", "chosen_us", "best_us", "chosen", "tried")
    report.finish(columns, bandwidth_gb_per_s=round(bandwidth, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
