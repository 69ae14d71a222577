"""Run the GRPO examples as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import running, tiny_config
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^ +(\d) +([\d.]+) +([\d.]+) +([\d.]+) +(\S+) +(\d+) +(\d+) +(\d+)$", re.MULTILINE)


def run(*command: str, timeout: float = 1200, environment: dict[str, str] | None = None) -> str:
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (environment or {})
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=variables, timeout=timeout
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


def rewards_of(shown: str) -> list[float]:
    """Return the printed rewards, after checking what the examples over HTTP print at their end."""
    assert float(re.search(r"^largest difference of log-probabilities: (\S+)$", shown, re.MULTILINE)[1]) < 1e-4
    assert re.search(r"^graphs captured: [1-9]\d* before the updates, 0 after$", shown, re.MULTILINE), shown
    return [float(found) for found in re.findall(r"^step +\d+ +reward ([\d.]+)$", shown, re.MULTILINE)]


@pytest.mark.slow
def test_a_server_is_trained_over_http() -> None:
    rewards = rewards_of(run("examples/grpo_over_http.py", "--steps", "30", "--port", str(free_port())))
    assert len(rewards) == 3 and rewards[2] > 1.2 * rewards[0]


def test_a_server_takes_weights_over_a_group_and_captures_nothing() -> None:
    shown = run("examples/grpo_remote.py", "--steps", "3", "--port", str(free_port()))
    assert len(rewards_of(shown)) == 1
    assert "the server holds the trainer's weights: yes\n" in shown


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_server_is_trained_over_a_group(dialect: str) -> None:
    shown = run("examples/grpo_remote.py", "--steps", "60", "--port", str(free_port()), "--dialect", dialect)
    rewards = rewards_of(shown)
    assert len(rewards) == 6 and rewards[5] > 1.5 * rewards[0]
    assert "the server holds the trainer's weights: yes\n" in shown


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", "secret"])
def test_a_server_that_runs_already_is_trained_over_a_group(tmp_path: Path, key: str) -> None:
    folder = tmp_path / "model"
    save = "import sys; sys.path.insert(0, 'examples'); import grpo; grpo.save_tiny_model(sys.argv[1], 3)"
    run("-c", save, str(folder))  # random weights of another seed than the example's, which it must replace
    (tmp_path / "key").write_text(key)
    admin = {"admin_key_file": str(tmp_path / "key")} if key else {"admin_without_key": "loopback"}
    settings = {"dtype": "bfloat16", "warmup": "full", "max_model_len": 64, "max_num_seqs": 160}
    with running(tiny_config(str(folder), **admin, **settings)) as handle:
        url = ("--url", str(handle.http.base_url), "--model", str(folder))
        shown = run("examples/grpo_remote.py", "--steps", "10", *url, environment={"ENCORE_ADMIN_KEY": key})
    assert "the server holds the trainer's weights: yes\n" in shown
    assert re.search(r"^graphs captured: [1-9]\d* before the updates, 0 after$", shown, re.MULTILINE), shown


MEGATRON_ROW = re.compile(r"first 10 steps ([\d.]+), last 10 ([\d.]+)$", re.MULTILINE)


def megatron_rewards(*options: str) -> tuple[float, float]:
    """Run the Megatron example, and return the first and the last mean rewards."""
    shown = run("examples/grpo_megatron.py", *options)
    assert float(re.search(r"^largest difference of log-probabilities: (\S+)$", shown, re.MULTILINE)[1]) < 1e-4
    captured = re.search(
        r"^graphs captured: (\d+) in the first 4 steps, 0 after; (\d+) replays in", shown, re.MULTILINE
    )
    assert captured and int(captured[1]) > 10 and int(captured[2]) > 0, shown
    first, last = MEGATRON_ROW.search(shown).groups()
    return float(first), float(last)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_megatron_model_learns_in_the_storage_that_it_generates_from(seed: str) -> None:
    first, last = megatron_rewards("--seed", seed)
    assert last > 1.5 * first
