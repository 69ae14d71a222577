"""Run the GRPO examples as a user would."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^ +(\d) +([\d.]+) +([\d.]+) +([\d.]+) +(\S+) +(\d+) +(\d+) +(\d+)$", re.MULTILINE)


def run(*command: str, timeout: float = 180) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_the_reward_grows_and_no_graph_is_captured_again(tmp_path: Path) -> None:
    plot = tmp_path / "rewards.png"
    shown = run("examples/grpo.py", "--seeds", "1", "--steps", "40", "--plot", str(plot), "--compare")
    [(seed, first, last, gain, difference, captures, recaptures, dropped)] = ROW.findall(shown)
    assert (seed, recaptures, dropped) == ("0", "0", "0") and int(captures) > 10
    assert float(gain) > 1.5 and float(last) > float(first) and float(difference) < 1e-4
    assert len(re.findall(r"^with(?:out)? graphs +[\d.]+ ms per step, +[\d.]+ ms of it rollouts$", shown, re.M)) == 2
    assert plot.stat().st_size > 1000 or "matplotlib is not installed" in shown


@pytest.mark.slow
def test_the_whole_run_learns_with_every_seed() -> None:
    shown = run("examples/grpo.py", "--plot", "", timeout=1800)
    rows = ROW.findall(shown)
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert all(float(row[3]) >= 1.5 for row in rows), "mean of the last 10 steps over the first 10"
    assert all(float(row[4]) < 1e-3 and row[6:] == ("0", "0") for row in rows)


@pytest.mark.slow
def test_a_pool_of_engines_learns_too() -> None:
    pytest.importorskip("ray")
    [row] = ROW.findall(
        run("examples/grpo.py", "--engines", "2", "--seeds", "1", "--steps", "40", "--plot", "", timeout=600)
    )
    assert float(row[3]) > 1.5 and float(row[4]) < 1e-4


@pytest.mark.slow
def test_a_server_is_trained_over_http() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shown = run("examples/grpo_over_http.py", "--steps", "30", "--port", str(port))
    rewards = [float(found) for found in re.findall(r"^step +\d+ +reward ([\d.]+)$", shown, re.MULTILINE)]
    assert len(rewards) == 3 and rewards[2] > 1.2 * rewards[0]
    assert float(re.search(r"^largest difference of log-probabilities: (\S+)$", shown, re.MULTILINE)[1]) < 1e-4
    assert re.search(r"^graphs captured: [1-9]\d* before the updates, 0 after$", shown, re.MULTILINE)
