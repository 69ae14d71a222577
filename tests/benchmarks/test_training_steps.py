"""The training benchmarks run on a CPU at small sizes, and compare losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.training.step_timing import LossComparison

SMALL = ["--layers=1", "--width=128", "--warm=1", "--steps=1", "--loss-steps=10", "--ways=local", "--one"]
TOWER = ["--tower-layers=2", "--tower-width=72", "--side=32", "--length=24", "--batches=2"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["packed_step", "--length=64"],
        ["vision_step", "--model=transformers", *TOWER],
        ["vision_step", "--model=megatron", *TOWER],
    ],
    ids=["packed", "vision of transformers", "vision of Megatron"],
)
def test_a_way_with_graphs_runs_and_replays(arguments):
    name, *flags = arguments
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.training.{name}", *SMALL, *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert len(row["losses"]) == 10 and row["ms"] > 0 and row["replays"] > 0 and row["failed"] == 0


def test_losses_are_compared_with_eager_and_with_every_earlier_way():
    compare, eager = LossComparison(), {"way": "eager", "batch": 1, "losses": [1.0, 2.0]}
    found = []
    for way, losses in (("eager", [1.0, 2.0]), ("padded", [1.0, 2.5]), ("broken", None), ("local", [1.0, 2.5])):
        row = {"way": way, "batch": 1} | ({} if losses is None else {"losses": losses})
        compare(row, eager)
        found.append((row.get("loss_difference"), row.get("same_losses_as")))
    assert found == [(None, None), (0.5, None), (None, None), (0.5, "padded")]
    row = {"way": "eager", "batch": 2, "losses": [1.0, 2.5]}
    compare(row, row)
    assert "same_losses_as" not in row and "loss_difference" not in row
