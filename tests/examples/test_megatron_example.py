"""Run the Megatron example as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_trains_the_same_with_graphs_and_generates_text():
    done = subprocess.run(
        [sys.executable, "examples/megatron_graphed.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "every loss the same: yes" in done.stdout and "\nthe quick brown " in done.stdout
