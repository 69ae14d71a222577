"""Run the training example as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_trains_to_a_lower_loss_equal_with_and_without_graphs():
    done = subprocess.run(
        [sys.executable, "examples/train_graphed.py", "--steps", "30"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    first, last = (re.search(rf"^{name} loss +(\S+) +(\S+)$", done.stdout, re.MULTILINE) for name in ("first", "last"))
    assert first[1] == first[2] and last[1] == last[2] and float(last[1]) < 0.7 * float(first[1])
    assert "every loss the same: yes" in done.stdout and "step 30 of 30" in done.stdout
    rows = re.findall(r"^(layers\.\d) +(\d+)  (\{.*?\})", done.stdout, re.MULTILINE)
    assert rows == [(f"layers.{index}", "27", "{'warming_up': 3}") for index in range(4)]
    eager, graphs = map(float, re.search(r"^CPU time/step +(\S+) ms +(\S+) ms$", done.stdout, re.MULTILINE).groups())
    assert ("graphs are slower on this CPU" in done.stdout) or graphs <= eager
