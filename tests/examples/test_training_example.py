"""Run the training example as a user would."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FEWER_STEPS = "from examples import train_graphed; train_graphed.STEPS = 24; train_graphed.main()"


def test_the_example_trains_to_a_lower_loss_equal_with_and_without_graphs():
    done = subprocess.run(
        [sys.executable, "-c", FEWER_STEPS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    first, last, same = re.search(
        r"^loss (\S+) -> (\S+); the same with graphs on and off: (\w+)$", done.stdout, re.MULTILINE
    ).groups()
    assert float(last) < 0.7 * float(first) and same == "True"
    rows = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(row["module"], row["replays"], row["eager"]) for row in rows] == [
        (f"layers.{index}", 21, {"warming_up": 3}) for index in range(4)
    ]
