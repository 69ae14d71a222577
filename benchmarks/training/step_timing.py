"""Shared by the training benchmarks: the time of a step, the host's part of it and peak memory.

Each way runs in a separate process, so that peaks of memory do not mix.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from engine import Engine

SIZES = {"layers": 24, "width": 1024, "length": 512, "warm": 8, "steps": 16}
LEARNING_RATE = 1e-5  # small, so that losses do not magnify differences of rounding
COLUMNS = ("way", "batch", "ms", "times_eager", "synced_ms", "host_ms", "peak_mib", "peak_reserved_mib", "error")
# With --loss-steps: the largest difference of a loss to eager's, and the ways that had the same losses bit for bit.
LOSS_COLUMNS = (*COLUMNS[:-1], "replays", "loss_difference", "same_losses_as", "error")


def timed(step: Callable[[int], torch.Tensor], engines: Sequence[Engine], warm: int, steps: int) -> dict[str, Any]:
    """Time `step`, which runs step number n and returns its loss, and detach the engines.

    Returns
    - ms: a step when `steps` of them are enqueued and the last is waited for, as in a job that logs now and then;
      median of three.
    - synced_ms: a step that is waited for. host_ms: until its last call returned. Medians.
    - last_losses: for a look at whether all ways compute the same.
    - peak_mib, peak_reserved_mib: of the whole run; steady_…: without the warm-up, in which graphs are captured.
    - replays, failed: of the engines' graphs.
    """
    losses = [step(index).item() for index in range(warm)]
    whole = _peaks()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    synced, host, windows = [], [], []
    for index in range(steps):
        started = time.perf_counter()
        loss = step(index)
        host.append((time.perf_counter() - started) * 1e3)
        losses.append(loss.item())
        synced.append((time.perf_counter() - started) * 1e3)
    for _ in range(3):
        started = time.perf_counter()
        for index in range(steps):
            loss = step(index)
        losses.append(loss.item())
        windows.append((time.perf_counter() - started) * 1e3 / steps)
    found = {
        "ms": round(statistics.median(windows), 3),
        "synced_ms": round(statistics.median(synced), 3),
        "host_ms": round(statistics.median(host), 3),
        "last_losses": [round(loss, 4) for loss in losses[-3:]],
    }
    steady = _peaks()
    found |= {name: max(whole[name], peak) for name, peak in steady.items()}
    found |= {f"steady_{name}": peak for name, peak in steady.items()}
    for engine in engines:
        rows = engine.graphs()
        found["replays"], found["failed"] = sum(row["replays"] for row in rows), sum(row["failed"] for row in rows)
        engine.detach()
    return found


def losses_of(step: Callable[[int], torch.Tensor], steps: int) -> list[float]:
    """Run the first steps of a training run and return their losses."""
    return [step(index).item() for index in range(steps)]


class LossComparison:
    """Compares the losses of each row with the losses of the earlier ways of its batch: `compare` of `run_ways`."""

    def __init__(self) -> None:
        self._earlier: list[dict[str, Any]] = []

    def __call__(self, row: dict[str, Any], eager: dict[str, Any]) -> None:
        """Add the largest difference to eager's losses, and the ways that had the same losses bit for bit."""
        if "losses" not in row:
            return
        earlier = [other for other in self._earlier if other["batch"] == row["batch"]]
        if earlier and "losses" in eager:
            pairs = zip(row["losses"], eager["losses"], strict=True)
            row["loss_difference"] = round(max(abs(ours - theirs) for ours, theirs in pairs), 6)
        same = [other["way"] for other in earlier if other["losses"] == row["losses"]]
        if same:
            row["same_losses_as"] = ",".join(same)
        self._earlier.append(row)


def _peaks() -> dict[str, int]:
    """Peaks in MiB. Memory that graphs use between tensors is in the reserved bytes only."""
    if not torch.cuda.is_available():
        return {}
    return {
        "peak_mib": torch.cuda.max_memory_allocated() >> 20,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
    }


def run_ways(
    module: str,
    ways: Sequence[str],
    args: argparse.Namespace,
    flags: Sequence[str],
    report: harness.Report,
    compare: Callable[[dict[str, Any], dict[str, Any]], None] = lambda row, eager: None,
) -> None:
    """Run `python -m module --one --ways W --batches B` for each way and batch; add its figures to the report.

    Rows of a batch whose "eager" ran before them also get their ratios to it. A way that fails has its error in place
    of figures. `compare(row, eager)` may change a row; `eager` is that of its batch as it was printed, or empty.
    """
    sizes = [f"--{name}={getattr(args, name)}" for name in SIZES]
    for batch in args.batches:
        eager: dict[str, Any] = {}
        for way in ways:
            command = [sys.executable, "-m", module, "--one", "--batches", str(batch), "--ways", way, *sizes, *flags]
            done = subprocess.run(command, capture_output=True, text=True)
            row: dict[str, Any] = {"way": way, "batch": batch}
            if done.returncode == 0:
                row |= json.loads(done.stdout.splitlines()[-1])
            else:
                row["error"] = _error_in(done.stderr) or f"exit status {done.returncode}"
            if way == "eager":
                eager = dict(row)
            if "ms" in row and "ms" in eager:
                row["times_eager"] = round(eager["ms"] / row["ms"], 2)
                row |= {
                    f"{name}_over_eager": round(peak / eager[name], 3) for name, peak in row.items() if "peak" in name
                }
            compare(row, eager)
            report.add(row)


def _error_in(output: str) -> str:
    """Return the last line that names an exception, or else the last line. Warnings may follow a traceback."""
    lines = output.strip().splitlines()
    named = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|Refused)\b", line)]
    return (named or lines or [""])[-1][:200]


def add_arguments(parser: argparse.ArgumentParser, ways: Sequence[str], default: Sequence[str]) -> None:
    """Add what both benchmarks ask for: batches, ways, the model's sizes and the number of steps."""
    parser.add_argument("--batches", type=harness.counts, default=[1, 4, 8])
    parser.add_argument("--ways", type=harness.names(ways), default=list(default), help=f"of {', '.join(ways)}")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=harness.count, default=size)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # one way, in this process
