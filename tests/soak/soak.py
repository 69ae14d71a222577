"""Two soak tests of a server with a tiny model: many concurrent streams, and clients that disconnect at random times.

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.soak.soak --json benchmarks/results/http-soak.json

After each, gauges must be zero, pages free, the engine's leak check clean, and memory flat over the second half.
Otherwise the command prints the faults and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.conftest import write_tiny_model
from tests.soak.serving import IDLE_GAUGES, Serving, results, serving, start_load

IDLE_SECONDS = 30.0
CHECK_SECONDS = 5.5  # the engine checks for leaks when it becomes idle, at most every five seconds
FLAT_BYTES = 12 * 2**20  # growth over the second half below this is noise: arenas, fragmentation
LOADS = 2  # load generator processes


def wait_idle(server: Serving) -> dict[str, float]:
    """Wait until all gauges are zero, at most IDLE_SECONDS, and return them."""
    end = time.monotonic() + IDLE_SECONDS
    while True:
        found = {name: server.metric(name) for name in IDLE_GAUGES}
        if not any(found.values()) or time.monotonic() > end:
            return found
        time.sleep(0.1)


def run_load(
    server: Serving, requests: int, streams: int, tokens: int, seed: int, aborts: int = 0, abort_seconds: float = 0.0
) -> list[dict[str, Any]]:
    """Run one load, split over LOADS processes, and return their reports."""
    return results([
        start_load(server.url, requests=requests // LOADS, streams=streams // LOADS, aborts=aborts // LOADS,
                   tokens=tokens, seed=seed * LOADS + number, abort_seconds=abort_seconds)
        for number in range(LOADS)
    ])  # fmt: skip


def soak(
    server: Serving, name: str, requests: int, streams: int, aborts: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Run the load in `rounds` equal parts; check memory and leaks after each. Failures are listed in `faults`."""
    # Abort within 0.8 of the median request time, measured by a load of the same size that is not counted.
    typical = run_load(server, streams, streams, tokens, rounds + 1)[0]["request_ms"]["p50"] / 1250
    memory, reports, leaks = [], [], server.metric("idle_check_failures_total")
    for number in range(rounds):
        reports += run_load(server, requests // rounds, streams, tokens, number, aborts // rounds, typical)
        gauges = wait_idle(server)
        memory.append(server.memory())
        if any(gauges.values()):
            break
    time.sleep(CHECK_SECONDS)
    run_load(server, LOADS, LOADS, 2, rounds)  # becoming idle once more triggers the engine's leak check
    gauges = wait_idle(server)
    total = {key: sum(report[key] for report in reports) for key in ("finished", "aborted", "tokens", "chunks")}
    refused = {key: count for report in reports for key, count in report["refused"].items()}
    half = len(memory) // 2 - 1
    growth = {process: memory[-1][process] - memory[half][process] if half > 0 else 0 for process in memory[0]}
    faults = [f"{gauge} is {value}" for gauge, value in gauges.items() if value]
    if server.metric("kv_cache_usage_perc") > 0:
        faults.append("KV pages are in use")
    if server.metric("idle_check_failures_total") != leaks:
        faults.append("the engine found a leak: its log says which")
    if refused or total["finished"] + total["aborted"] != requests // rounds * rounds:
        faults.append(f"{requests} requests: {total['finished']} finished, {total['aborted']} left, refused: {refused}")
    if total["aborted"] < 0.9 * aborts:
        faults.append(f"only {total['aborted']} of {aborts} clients disconnected in time: the run proves too little")
    faults += [f"{process} grew by {size >> 20} MiB" for process, size in growth.items() if size > FLAT_BYTES]
    reports_by_round = [reports[i : i + LOADS] for i in range(0, len(reports), LOADS)]
    return {
        "name": name, "requests": requests, "streams": streams, "asked_to_leave": aborts, **total,
        "streams_together": max(sum(report["streams_together"] for report in one) for one in reports_by_round),
        "seconds": round(sum(max(report["seconds"] for report in one) for one in reports_by_round), 1),
        "first_token_ms": reports[-1]["first_token_ms"], "memory_bytes": memory, "second_half_growth_bytes": growth,
        "restarts": server.metric("engine_restarts_total"), "faults": faults,
    }  # fmt: skip


def run(model: Path, log: Path, scale: float = 1.0) -> list[dict[str, Any]]:
    """Run both tests against one server. A `scale` below 1 shortens them."""
    streams = max(1, int(250 * scale)) * LOADS
    requests = max(1, int(50 * scale)) * 20 * LOADS  # so that ten rounds and both processes get equal parts
    flags = ["--dtype", "float32", "--num-threads", "1", "--max-num-seqs", str(min(512, streams + 12)),
             "--max-model-len", "256", "--max-waiting", "2048", "--warmup", "lazy"]  # fmt: skip
    with serving(model, log, *flags) as server:
        run_load(server, 4 * LOADS, 2 * LOADS, 8, 99)
        return [
            soak(server, "streams at once", streams * 4, streams, 0, 64, 4),
            soak(server, "clients that leave", requests, max(LOADS, streams // 4), requests // 2, 100, 10),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="1: 500 streams, 2,000 requests")
    parser.add_argument("--json", type=Path, help="write the results there")
    found = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model")
        log = Path(folder) / "server.log"
        runs = run(Path(folder) / "model", log, found.scale)
        tail = log.read_text()[-3000:]
    for one in runs:
        print(json.dumps(one))
    faults = [fault for one in runs for fault in one["faults"]]
    if found.json is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        found.json.write_text(json.dumps({
            "command": f"python -m tests.soak.soak --scale {found.scale:g}", "commit": commit,
            "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cpus": os.cpu_count(),
            "runs": runs,
        }, indent=1) + "\n")  # fmt: skip
    if faults:
        print("\n".join(faults), tail, sep="\n", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
