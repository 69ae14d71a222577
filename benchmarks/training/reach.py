"""Ordinary training programs: the shares that replay graphs, the reasons of the others, all compared with eager.

Each program (`benchmarks/training/programs`) runs twice with the same seeds, eager and with graphs, for 8 steps on a
CPU. Everything that it logs, and its last weights, gradients, optimizer state and random generators, must have the same
bits; exit status 1 if any differ or a run fails with graphs only.

Captures begin after one eager step of a call signature. Columns of a row: `steps` has a letter per step, R if graphs
ran and no training call ran eager, p if both happened, and a dot for eager. A program "replays" with any R or p, and
replays "every step" if the last four are R. Calls without gradients (evaluation, teachers) do not count as eager.

Programs that need a package that is not installed (PEFT, TRL, Lightning, timm) are left out, and those that fail eager
are not counted. `capture_steps` is the CPU
time of all runs with graphs less that of eager, over an eager step: what warm-up, captures and checks cost.
"""

from __future__ import annotations

import gc
import logging
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.training.programs import registry

NEEDS = "CPU"
SETTLED = 4  # steps after which all must replay
SHOWN = 160  # characters of a reason
# Starts of the texts of failed captures, and the kinds of reasons that the summary counts.
KINDS = (
    ("reads a tensor's values", "host read"),
    ("depends on data", "shape depends on data"),
    ("random generator is set", "generator state"),
    ("changes ", "Python state"),
    ("returns tensors inside", "result object"),
    ("differentiated again", "double backward"),
    ("is not compared at every call", "large host data"),
    ("prepares the reduction", "data-parallel wrapper"),
)


def main(argv: Sequence[str]) -> int:
    """Run the programs; return the exit status."""
    parser = harness.parser(__name__, __doc__ or "")
    parser.add_argument("--only", default="", metavar="TEXT", help="programs with this text in their names")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found = {name: one for name, one in registry.programs().items() if args.only in name}
    if not found:
        parser.error(f"--only {args.only}: no program has such a name")
    report = harness.Report(__name__, args, argv)
    rows = []
    for name, function in found.items():
        rows.append(measured(name, function))
        report.add(rows[-1])
    summary = summarised(rows)
    report.finish(["program", "steps", "reason", "difference"], **summary)
    print()
    for name, value in summary.items():
        print(f"{name:24} {value}")
    return 1 if any(row["difference"] for row in rows) else 0


def measured(name: str, function: registry.Program) -> dict[str, Any]:
    """Run a program both ways and return its row."""
    row: dict[str, Any] = {"program": name, "steps": "", "reason": "", "difference": ""}
    try:
        eager, eager_seconds = _timed(function, None)
    except Exception as error:  # of any kind, such as a package of another version
        return row | {"reason": f"not run: {type(error).__name__}: {error}"[:SHOWN]}
    with registry.new_engine() as engine:
        try:
            graphed, seconds = _timed(function, engine)
        except Exception as error:  # of any kind: eager raised none
            return row | {"difference": f"{type(error).__name__}: {error}"[:SHOWN]}
        failures = [one["failure"] for one in engine.graphs() if one["failure"]]
    row["steps"] = "".join("R" if step.is_replayed else "p" if step.replays else "." for step in graphed.steps_done)
    reasons: Counter[str] = sum((step.reasons for step in graphed.steps_done[SETTLED:]), Counter())
    if reasons:
        row["reason"] = ", ".join(reasons) if "capture_failed" not in reasons else _shortened(failures)
        row["kind"] = _kind(row["reason"], reasons)
    row["difference"] = registry.difference(eager, graphed)
    row["capture_steps"] = round((seconds - eager_seconds) / max(eager_seconds / registry.STEPS, 1e-9), 1)
    gc.collect()
    return row


def _timed(function: registry.Program, engine: Any) -> tuple[registry.Run, float]:
    started = time.process_time()
    run = registry.run_program(function, engine)
    return run, time.process_time() - started


def _shortened(failures: Sequence[str]) -> str:
    return failures[0][:SHOWN] if failures else "capture_failed"


def _kind(text: str, reasons: Counter[str]) -> str:
    if "capture_failed" not in reasons:
        return next(iter(reasons))
    return next((kind for part, kind in KINDS if part in text), "other")


def summarised(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the shares and the counted reasons."""
    ran = [row for row in rows if row["steps"] or row["difference"]]
    replaying = [row for row in ran if set(row["steps"]) & set("Rp")]
    every = [row for row in ran if set(row["steps"][SETTLED:]) == {"R"}]
    kinds = Counter(row["kind"] for row in ran if "kind" in row)
    return {
        "programs": len(ran),
        "not_run": len(rows) - len(ran),
        "replaying_share": round(len(replaying) / max(1, len(ran)), 3),
        "every_step_share": round(len(every) / max(1, len(ran)), 3),
        "median_capture_steps": round(statistics.median([row.get("capture_steps", 0) for row in ran] or [0]), 1),
        "differences": [row["program"] for row in rows if row["difference"]],
        "reasons": dict(kinds.most_common()),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
