"""How a training step is timed, beside its host's part and peak memory, each way in a process of its own so that peaks
don't mix. Shared by the benchmarks of training steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import Engine


def timed(step: Callable[[int], torch.Tensor], engines: Sequence[Engine], warm: int, steps: int) -> dict[str, Any]:
    """Figures of a function that runs step number n and returns its loss.

    ms: a step among others, with one wait at the end of `steps` of them, as a job that logs now and then has it (median
    of three). synced_ms: a step that is waited for; host_ms: until its last call returned. Peaks in MiB, of the whole
    run and ("steady") of the steps after the warm-up, in which graphs are captured. The losses must agree between ways.
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


def _peaks() -> dict[str, int]:
    """Allocated counts live tensors alone: memory that graphs use between tensors is in the reserved bytes only."""
    if not torch.cuda.is_available():
        return {}
    return {
        "peak_mib": torch.cuda.max_memory_allocated() >> 20,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
    }


def compared(module: str, ways: Sequence[str], batches: Sequence[int], options: Sequence[str]) -> list[dict[str, Any]]:
    """Run `python -m module --one --ways W --batches B` for each, and print each row, beside "eager" where that ran."""
    rows: list[dict[str, Any]] = []
    for batch in batches:
        for way in ways:
            command = [sys.executable, "-m", module, "--one", "--batches", str(batch), "--ways", way, *options]
            done = subprocess.run(command, capture_output=True, text=True)
            row = {"way": way, "batch": batch}
            if done.returncode == 0:
                row |= json.loads(done.stdout.splitlines()[-1])
            else:
                row["error"] = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]
            rows.append(row)
            eager = next((one for one in rows if one["batch"] == batch and one["way"] == "eager"), {})
            if "ms" in row and "ms" in eager:
                row["times_eager"] = round(eager["ms"] / row["ms"], 2)
                row |= {
                    f"{name}_over_eager": round(peak / eager[name], 3) for name, peak in row.items() if "peak" in name
                }
            print(json.dumps(row), flush=True)
    return rows


def sizes(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Add what both benchmarks ask: the model's sizes and how many steps; returns the options' names."""
    found = {"layers": 24, "width": 1024, "length": 512, "warm": 8, "steps": 16}
    for name, default in found.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return tuple(found)


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Keep the rows, if asked to, with the device that they were measured on."""
    if path is not None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        path.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
