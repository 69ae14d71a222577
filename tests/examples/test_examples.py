"""Run the examples of serving, embedding and the capture core as a user would, with the tests' tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_offline_batch_answers_every_prompt_by_replay(tiny_model: Path) -> None:
    shown = run("examples/offline_batch.py", str(tiny_model))
    assert shown.count(" -> ") == 4
    assert re.search(r"^decode bucket 4: \d+ replays$", shown, re.MULTILINE)


def test_the_rl_loop_raises_the_reward_and_keeps_every_graph() -> None:
    shown = run("examples/rl_loop.py")
    steps = [(float(r), float(d)) for r, d in re.findall(r"^ +\d+ +([\d.]+) +(\S+) +\d+ ms", shown, re.MULTILINE)]
    assert len(steps) == 15 and steps[0][0] < 0.6 and steps[-1][0] > 0.9
    assert max(difference for _, difference in steps) < 1e-4
    assert int(re.search(r"^graph replays: (\d+)$", shown, re.MULTILINE)[1]) > 100
    assert "graphs dropped by the updates: 0" in shown


def test_the_capture_core_replays_what_eager_computes() -> None:
    shown = run("examples/capture_core.py")
    rows = re.findall(r"^(encoder|mlp) +([124]) +\d+ us +\d+ us +(yes|no) +(.*)$", shown, re.MULTILINE)
    assert len(rows) == 6 and {equal for _, _, equal, _ in rows} == {"yes"}
    assert all(re.fullmatch(r"\d+\.\d times as fast|slower: see --help", gain) for *_, gain in rows)
    assert "captures         6 " in shown


def test_a_server_is_called_and_its_buckets_are_tuned(tiny_model: Path) -> None:
    program = f"import runpy, sys; sys.argv[1:] = [{str(tiny_model)!r}, '{free_port()}']; "
    shown = run("-c", program + "runpy.run_path('examples/serve_and_call.py', run_name='__main__')")
    assert "captured" in shown and "--graph-buckets" in shown
