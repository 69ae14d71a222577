"""A soak test of hours, in parts: mixed load and faults, with its state on disk.

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.soak.long --state DIR --minutes 60

Each part continues after the last one: its samples are added to DIR/samples.jsonl, and DIR/report.md and DIR/report.png
are written again. A part starts a server, whose turns each have a load with clients that leave, and one of FAULTS.
After each turn gauges must be zero, and memory, file descriptors and graphs are counted. Over the second half of the
turns of a process they must not grow. Otherwise the command prints the faults and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.conftest import write_tiny_model
from tests.soak.serving import Serving, resident, results, serving, start_load
from tests.soak.soak import FLAT_BYTES, wait_idle
from tests.soak.watch import processes_of

LEAST_TURNS = 60  # of a process, before its growth is judged: graphs are captured when they are first used
REQUESTS = 60  # of a turn
SPARE_FILES = 8  # connections that are about to close
SPARE_GRAPHS = 4  # of 15: of rare batch sizes, whose first use comes late
FLAGS = (
    "--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "16", "--max-model-len", "512", "--num-pages", "200",
    "--warmup", "lazy", "--admin-without-key", "loopback", "--enable-sleep-mode", "--kv-offloading-size", "0.02",
    "--write-seconds", "2",
)  # fmt: skip


# ---- faults, each during a load ------------------------------------------------------------------------------------


def nothing(server: Serving, turn: int, model: Path) -> None:
    """The load alone."""


def sleep_and_wake(server: Serving, turn: int, model: Path) -> None:
    """Release all memory of the engine in the middle of the load, which ends its requests, and restore it."""
    post(server, "/sleep?level=1")
    time.sleep(0.3)
    post(server, "/wake_up")


def update_weights(server: Serving, turn: int, model: Path) -> None:
    """Load the weights again, under another version: requests are computed again."""
    post(server, "/update_weights_from_disk", {"model_path": str(model), "weight_version": f"turn-{turn}"})


def slow_readers(server: Serving, turn: int, model: Path) -> None:
    """Open streams and read nothing of them, until the server closes them or they are left."""
    where = urlsplit(server.url)
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    open_ones = []
    for _ in range(4):
        one = socket.create_connection((where.hostname or "", where.port or 80))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        open_ones.append(one)
    time.sleep(1.0)
    for one in open_ones:
        one.close()


def kill_engine(server: Serving, turn: int, model: Path) -> None:
    """Kill the engine's process, and wait until another one serves."""
    killed = server.engine_pid
    os.kill(killed, signal.SIGKILL)
    end = time.monotonic() + 300  # an engine starts slowly on a busy machine
    while time.monotonic() < end:
        with suppress(OSError, ValueError):  # not ready; no engine process now
            if server.engine_pid != killed:  # the server may not have noticed yet
                server.get("/ready")
                return
        time.sleep(0.2)
    raise TimeoutError("no engine was ready within 300 s after its process was killed")


FAULTS: Sequence[Callable[[Serving, int, Path], None]] = (
    nothing, slow_readers, update_weights, nothing, sleep_and_wake, update_weights, slow_readers,
)  # fmt: skip
KILL_EVERY = 240  # turns: a process lives long enough to be judged, and a server restarts 5 times in 10 minutes at most
ENDS_REQUESTS = {"sleep_and_wake", "kill_engine"}


def fault_of(turn: int) -> Callable[[Serving, int, Path], None]:
    return kill_engine if turn % KILL_EVERY == KILL_EVERY - 1 else FAULTS[turn % len(FAULTS)]


def post(server: Serving, path: str, body: dict[str, Any] | None = None) -> None:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()


# ---- turns ---------------------------------------------------------------------------------------------------------


def take_turn(server: Serving, turn: int, model: Path) -> dict[str, Any]:
    """Run one turn, and return its sample."""
    fault = fault_of(turn)
    began = time.monotonic()
    prompt = 16 + 40 * (turn % 5)
    load = start_load(server.url, requests=REQUESTS, streams=12, tokens=48, prompt_tokens=prompt, aborts=8,
                      abort_seconds=0.5, seed=turn)  # fmt: skip
    time.sleep(0.5)  # until it sends
    fault(server, turn, model)
    [report] = results([load])
    gauges, faults = wait_idle(server), []
    faults += [f"{name} is {value}" for name, value in gauges.items() if value]
    if server.metric("kv_cache_usage_perc") > 0:
        faults.append("KV pages are in use")
    if leaks := server.metric("idle_check_failures_total"):
        faults.append(f"the engine found {leaks:g} leaks: its log says which")
    if report["refused"] and fault.__name__ not in ENDS_REQUESTS:
        faults.append(f"refused: {report['refused']}")
    if report["finished"] + report["aborted"] + sum(report["refused"].values()) != REQUESTS:
        faults.append(f"{REQUESTS} requests: {report}")
    return {
        "turn": turn, "time": time.time(), "seconds": round(time.monotonic() - began, 2), "fault": fault.__name__,
        "server": server.process.pid, "engine": server.engine_pid, "memory": server.memory(),
        "files": {"server": files_of(server.process.pid), "engine": files_of(server.engine_pid)},
        "processes": len(processes_of(server.process.pid)), "graphs": graphs_of(server),
        "finished": report["finished"], "aborted": report["aborted"], "refused": report["refused"],
        "tokens": report["tokens"], "first_token_ms": report["first_token_ms"], "faults": faults,
    }  # fmt: skip


def graphs_of(server: Serving) -> float:
    """Return the number of captured graphs; 0 before the first one."""
    try:
        return server.metric("graph_cache_entries")
    except LookupError:
        return 0.0


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def run_part(state: Path, minutes: float) -> None:
    """Start a server and take turns for some minutes; add a line to the samples after each."""
    model = state / "model"
    if not (model / "config.json").exists():
        write_tiny_model(model)
    turn = len(read_samples(state))
    end = time.monotonic() + 60 * minutes
    with serving(model, state / f"server-{turn}.log", *FLAGS) as server, open(state / "samples.jsonl", "a") as lines:
        while time.monotonic() < end:
            lines.write(json.dumps(take_turn(server, turn, model)) + "\n")
            lines.flush()
            turn += 1
        pids = processes_of(server.process.pid)
    if left := [pid for pid in pids if resident(pid)]:
        raise RuntimeError(f"processes {left} are left after the server's end")


def read_samples(state: Path) -> list[dict[str, Any]]:
    """Return the samples of all parts. A line that was cut off by a kill is left out."""
    path, found = state / "samples.jsonl", []
    if path.exists():
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


# ---- report --------------------------------------------------------------------------------------------------------


def growth_of(samples: Sequence[dict[str, Any]]) -> list[str]:
    """Return what grew over the second half of the turns of each process that lived for LEAST_TURNS."""
    found = []
    for process in ("server", "engine"):
        lives: dict[int, list[dict[str, Any]]] = {}
        for sample in samples:
            lives.setdefault(sample[process], []).append(sample)
        for pid, life in lives.items():
            if len(life) < LEAST_TURNS:
                continue
            half = life[len(life) // 2 :]
            for name, values, spare in (
                ("memory", [one["memory"][process] for one in half], FLAT_BYTES),
                ("file descriptors", [one["files"][process] for one in half], SPARE_FILES),
                ("graphs", [one["graphs"] if process == "engine" else 0 for one in half], SPARE_GRAPHS),
            ):
                if (grown := values[-1] - values[0]) > spare:
                    found.append(f"{process} {pid}: {name} grew by {grown:g} over {len(half)} turns")
    return found


def faults_of(samples: Sequence[dict[str, Any]]) -> list[str]:
    return [f"turn {one['turn']} ({one['fault']}): {fault}" for one in samples for fault in one["faults"]] + growth_of(
        samples
    )


def write_report(state: Path, samples: Sequence[dict[str, Any]], faults: Sequence[str]) -> None:
    """Write report.md, and report.png if matplotlib is installed."""
    hours = sum(one["seconds"] for one in samples) / 3600
    kinds = {one["fault"]: sum(other["fault"] == one["fault"] for other in samples) for one in samples}
    totals = {name: sum(one[name] for one in samples) for name in ("finished", "aborted", "tokens")}
    lines = [
        "# Soak",
        "",
        f"{len(samples)} turns, {hours:.2f} hours, {len({one['server'] for one in samples})} parts, "
        f"{len({one['engine'] for one in samples})} engine processes.",
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| {name} | {value:,} |" for name, value in totals.items()),
        *(f"| turns with {name} | {count} |" for name, count in sorted(kinds.items())),
        "",
        "## Faults",
        "",
        *([f"- {fault}" for fault in faults] or ["None."]),
    ]
    with suppress(ImportError):
        draw(state / "report.png", samples)
        lines += ["", "![Memory, file descriptors and graphs over time](report.png)"]
    (state / "report.md").write_text("\n".join(lines) + "\n")


def draw(path: Path, samples: Sequence[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(9, 10), sharex=True)
    turns = [one["turn"] for one in samples]
    for process in ("server", "engine"):
        axes[0].plot(turns, [one["memory"][process] / 2**20 for one in samples], label=process)
        axes[1].plot(turns, [one["files"][process] for one in samples], label=process)
    axes[2].plot(turns, [one["graphs"] for one in samples])
    axes[3].plot(turns, [one["first_token_ms"].get("p95", float("nan")) for one in samples])
    for axis, label in zip(axes, ("resident MiB", "file descriptors", "graphs", "first token, p95 ms"), strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0].legend()
    axes[3].set_xlabel("turn")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder of the samples and the report")
    parser.add_argument("--minutes", type=float, default=0.0, help="length of this part; 0: only write the report")
    found = parser.parse_args(arguments)
    found.state.mkdir(parents=True, exist_ok=True)
    if found.minutes:
        run_part(found.state, found.minutes)
    samples = read_samples(found.state)
    if not samples:
        parser.error(f"{found.state} has no samples: give --minutes")
    faults = faults_of(samples)
    write_report(found.state, samples, faults)
    print((found.state / "report.md").read_text())
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
