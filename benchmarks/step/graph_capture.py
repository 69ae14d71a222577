"""Graph capture: replay beside eager, capture time, pool memory, recapture, capture beside a busy thread.

    python -m benchmarks step.graph_capture --shape qwen3-0.6b --json FILE                      # on a GPU
    python -m benchmarks step.graph_capture --shape tiny --max-num-seqs 8 --repeats 5           # on a CPU

Random weights. Rows are decode steps by batch size. tokens_equal_eager: whether graphs of each scope give the tokens of
eager steps. recapture_bytes: memory in use after graphs were dropped and captured again, five times. memory_drift: its
largest change. allocating_thread: "ok" where a thread that allocates and synchronises does not disturb a capture.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.shapes import shape, shape_config, write_shape
from benchmarks.timing import synchronize, wall_ms
from engine.config import EngineConfig
from engine.core.builder import build_loop
from engine.core.loop import EngineLoop
from engine.protocol.request import EngineRequest, SamplingParams

NEEDS = "CPU or 1 GPU"


def build(folder: str, scope: str, seqs: int, buckets: tuple[int, ...] | None = None) -> EngineLoop:
    """Build an engine loop with random weights, the same ones in every call."""
    return build_loop(
        EngineConfig(
            model=folder,
            load_format="dummy",
            max_num_seqs=seqs,
            max_model_len=1024,
            inference_cuda_graph_scope=scope,
            cuda_graph_impl="local",
            graph_buckets=buckets,
            graph_manifest="none",
            warmup="full",
            num_pages=1 + seqs * 8,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.5,
        )
    )


def tokens_of(loop: EngineLoop, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return greedy continuations of all prompts, run as one batch."""
    for index, prompt in enumerate(prompts):
        loop.add(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
            )
        )
    found: dict[str, list[int]] = {}
    while loop.has_work:
        for event in loop.step():
            if event.error:
                raise SystemExit(event.error)
            found.setdefault(event.request_id, []).extend(event.token_ids)
    return [found[str(index)] for index in range(len(prompts))]


def prompts_for(rows: int, vocab: int, length: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for _ in range(rows)]


def replay_against_eager(loop: EngineLoop, batches: list[int], repeats: int) -> list[dict]:
    """Time decode steps as graph replays, and the same callable run eagerly on the same static buffers."""
    cache, site, rows = loop.executor.worker.runner.cache, loop.executor.worker.runner.site, []
    statics = dict(site.variants[0])
    for batch in batches:
        plan = cache.plan(site.name, batch, **statics)
        loop.executor.worker.runner.buffers.fill_dummy()
        replay = wall_ms(lambda plan=plan: cache.run(plan), repeats)
        with torch.inference_mode():
            eager = wall_ms(lambda plan=plan: site.run_eager(plan.key), repeats)
        rows.append(
            {
                "batch": batch,
                "replay_ms": round(replay, 4),
                "eager_ms": round(eager, 4),
                "speedup": round(eager / replay, 2),
            }
        )
    return rows


def recapture(loop: EngineLoop, times: int) -> dict[str, list[int]]:
    """Delete all graphs and capture them again; return the bytes in use with and without graphs, per round."""
    found: dict[str, list[int]] = {"with_graphs": [], "without": []}
    for _ in range(times):
        loop.executor.worker.runner.cache.clear()
        found["without"].append(device_bytes(loop))
        loop.captures.warm()
        torch.cuda.empty_cache()
        found["with_graphs"].append(device_bytes(loop))
    return found


def device_bytes(loop: EngineLoop) -> int:
    """Bytes in use: of the whole device on a GPU, of the graphs' pool on a CPU."""
    synchronize()
    if not torch.cuda.is_available():
        return loop.executor.worker.runner.cache.pool_bytes
    free, total = torch.cuda.mem_get_info()
    return total - free


def with_allocating_thread(loop: EngineLoop) -> str:
    """Capture everything while another thread allocates and synchronises on the device."""
    loop.executor.worker.runner.cache.clear()
    stop, trouble, device = threading.Event(), [], loop.executor.worker.runner.device

    def allocate() -> None:
        try:
            while not stop.is_set():
                torch.empty(1 << 22, device=device).fill_(1.0).sum().item()
        except Exception as error:
            trouble.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=allocate)
    thread.start()
    loop.captures.warm()
    stop.set()
    thread.join()
    states = {row["state"] for row in loop.graphs()}
    return "ok" if states == {"captured"} and not trouble else f"states {states}, thread {trouble}"


def address_check(loop: EngineLoop, step_ms: float) -> dict[str, float]:
    """Time a comparison of all addresses: alone on the host, and what it adds to a step while the device works."""
    cache, site = loop.executor.worker.runner.cache, loop.executor.worker.runner.site
    plan = cache.plan(site.name, 1, **dict(site.variants[0]))
    started = time.perf_counter()
    for _ in range(200):
        cache.check_addresses()
    host_ms = (time.perf_counter() - started) / 200 * 1e3

    def checked() -> None:
        cache.run(plan)
        cache.check_addresses()

    taken = harness.alternate(
        {"plain": lambda: wall_ms(lambda: cache.run(plan), 30), "checked": lambda: wall_ms(checked, 30)}, 5
    )
    added = statistics.median(taken["checked"]) - statistics.median(taken["plain"])
    return {
        "tensors": sum(map(len, site.address_books)),
        "host_ms": round(host_ms, 4),
        "added_share_of_step": round(added / step_ms, 4),
    }


def measure(report: harness.Report, folder: str, shape: str, seqs: int, repeats: int) -> dict[str, Any]:
    """Add a row per batch size to the report and return the figures that belong to no batch size."""
    vocab = shape_config(shape)["vocab_size"]
    found: dict[str, Any] = {}
    loop = build(folder, "block", seqs)
    started = time.perf_counter()
    loop.captures.warm()
    synchronize()
    found["graphs"] = len(loop.graphs())
    found["capture_seconds"] = round(time.perf_counter() - started, 2)
    found["failed"] = [row["failure"] for row in loop.graphs() if row["state"] != "captured"]
    found["pool_bytes"] = loop.executor.worker.runner.cache.pool_bytes
    for row in replay_against_eager(loop, [b for b in (1, 8, 32, 128, 256) if b <= seqs], repeats):
        report.add(row)
    found["address_check"] = address_check(loop, report.rows[0]["replay_ms"])

    largest = build(folder, "block", seqs, (seqs,))
    largest.warm()
    found["largest_graph_bytes"] = largest.runner.cache.pool_bytes
    found["pool_over_largest"] = round(found["pool_bytes"] / max(1, found["largest_graph_bytes"]), 3)
    del largest

    small = {scope: build(folder, scope, 8) for scope in ("block", "layer", "none")}
    found["tokens_equal_eager"] = {
        str(rows): {
            scope: tokens_of(small[scope], prompts_for(rows, vocab), 24)
            == tokens_of(small["none"], prompts_for(rows, vocab), 24)
            for scope in ("block", "layer")
        }
        for rows in (1, 3, 7)
    }
    del small

    found["recapture_bytes"] = recapture(loop, 5)
    found["memory_drift"] = {
        name: round(max(abs(one - used[0]) for one in used) / max(1, used[0]), 5)
        for name, used in found["recapture_bytes"].items()
    }
    found["allocating_thread"] = with_allocating_thread(loop)
    return found


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--shape", type=shape, default="tiny")
    parser.add_argument("--max-num-seqs", type=harness.count, default=256)
    parser.add_argument("--repeats", type=harness.count, default=50)
    args = parser.parse_args(argv)
    report = harness.Report(__spec__.name, args, argv)
    with tempfile.TemporaryDirectory() as root:
        found = measure(report, write_shape(args.shape, root), args.shape, args.max_num_seqs, args.repeats)
    for name, value in found.items():
        print(f"{name:28} {json.dumps(value)}")
    report.finish(**found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
