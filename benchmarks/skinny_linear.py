"""Linear layers for few rows on a GPU: our kernels' variants against cuBLAS, µs a layer inside one graph.

`python -m benchmarks.skinny_linear --shapes qwen3-0.6b --rows 1,8,32 --out results.json`. Each figure is one graph of
24 layers with weights of their own (more than the L2 holds), so weights come from memory as they do in a model, and
launches overlap as they do there. `floor` is the weights' bytes at --bandwidth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.kernels.small_batch_gemm import WIDE, LaunchConfig, Scratch, choose_config, linear, suits_library

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


SHAPES = {
    "qwen3-0.6b": [
        Case("qkv", 4096, 1024, norm=True),
        Case("o", 1024, 2048, add=True),
        Case("gate_up", 3072, 1024, norm=True, gated=True),
        Case("down", 1024, 3072, add=True),
        Case("head", 151936, 1024, norm=True, best=True),
    ],
    "qwen3-8b": [
        Case("qkv", 6144, 4096, norm=True),
        Case("o", 4096, 4096, add=True),
        Case("gate_up", 12288, 4096, norm=True, gated=True),
        Case("down", 4096, 12288, add=True),
        Case("head", 151936, 4096, norm=True, best=True),
    ],
}


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
    full = max(16, 1 << (rows - 1).bit_length())
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
        buffers["w"][layer % len(buffers["w"])],
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


def microseconds(body: Any, layers: int, repeats: int = 7) -> float:
    """Median µs per layer of a graph of `layers` calls."""
    body(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            body(layer)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / layers)
    return statistics.median(times)


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
    """Fill Triton's cache from a process of its own: every `stride`-th candidate; how many could be launched."""
    shape, rows, offset, stride = job
    done = 0
    for case in SHAPES[shape]:
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
    """One product: floor, cuBLAS and our best variants, each with its relative error against float64."""
    layers = 4 if case.n > 50000 else LAYERS
    buffers = make_buffers(case, rows, layers)
    wanted = reference(case, buffers)
    floor = sum(w.nbytes for w in buffers["w"]) / layers / bandwidth / 1e3
    row: dict[str, Any] = {
        "rows": rows,
        "case": case.name,
        "floor": round(floor, 2),
        "ours": [],
        "failed": [],
        "cublas": round(microseconds(cublas(case, buffers), layers), 2),
    }
    for pick in candidates(case, rows):
        try:
            buffers["out"].zero_()
            launch(case, pick, buffers, 0)
            error = ((buffers["out"].double() - wanted).norm() / wanted.norm()).item()
            fast = microseconds(lambda i: launch(case, pick, buffers, i), layers)  # noqa: B023
        except Exception as problem:
            row["failed"].append([pick, f"{type(problem).__name__}: {problem}"[:100]])
            continue
        row["ours"].append([round(fast, 2), round(error, 4), pick])
    row["ours"].sort(key=lambda entry: entry[0])
    row["chosen"] = (
        None
        if suits_library(rows, case.n, case.k, case.gated)
        else next(
            (us for us, _, pick in row["ours"] if pick == choose_config(rows, case.n, case.k, case.gated)), "failed"
        )
    )
    row["tried"] = len(row["ours"])
    row["ours"] = row["ours"][:8]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="qwen3-0.6b")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--bandwidth", type=float, default=4300.0, help="GB/s")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jobs = [
        (shape, int(rows), offset, args.processes)
        for shape in args.shapes.split(",")
        for rows in args.rows.split(",")
        for offset in range(args.processes)
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        print("compiled", sum(pool.map(compile_some, jobs)), flush=True)
    table = []
    for shape, rows in itertools.product(args.shapes.split(","), map(int, args.rows.split(","))):
        for case in SHAPES[shape]:
            row = {"shape": shape} | measure(case, rows, args.bandwidth)
            table.append(row)
            print(
                f"{shape} M={rows} {case.name}: floor {row['floor']} cublas {row['cublas']} chosen {row['chosen']} "
                f"tried {row['tried']} failed {len(row['failed'])} "
                + " | ".join(f"{us} e{error} {pick}" for us, error, pick in row["ours"][: args.top]),
                flush=True,
            )
    if args.out:
        args.out.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": table}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
