"""`encore batch --replicas 2` on a real Ray: one result for each line, also when a replica or the batch is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from tests.soak.serving import ENVIRONMENT, command_of
from tests.support.waiting import descendants, is_alive

pytest.importorskip("ray", reason="replicas run on Ray")
FLAGS = (
    "--replicas", "2", "--dtype", "float32", "--num-threads", "1", "--warmup", "lazy", "--graph-manifest", "none",
    "--max-num-seqs", "4", "--in-process",
)  # fmt: skip
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # they notice after a minute or two that Ray has ended
TOKENS = 100
Start = Callable[[Path], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `encore batch in.jsonl out.jsonl` for a model; its output goes to the file log."""
    begun: list[subprocess.Popen[bytes]] = []

    def start_one(model: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "server.cli", "batch", "in.jsonl", "out.jsonl", "--model", str(model), *FLAGS]
        with open(tmp_path / "log", "ab") as log:
            begun.append(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=ENVIRONMENT))
        return begun[-1]

    yield start_one
    for process in begun:
        process.kill()
        process.wait()


def wait_for_end(pids: list[int], seconds: float) -> None:
    """Wait for the end of processes, but not of Ray's agents."""
    end = time.monotonic() + seconds
    while left := [command_of(pid) for pid in pids if is_alive(pid) and not command_of(pid).startswith(RAYS_AGENTS)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def replicas_of(process: subprocess.Popen[bytes]) -> list[int]:
    return [pid for pid in descendants(process.pid) if command_of(pid).startswith("ray::ServeReplica:encore:Replica")]


def wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.02)


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_killed_replica_and_a_killed_batch_lose_and_double_no_line(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    ids = [f"line {number}" for number in range(240)]
    with open(tmp_path / "in.jsonl", "w") as file:
        for one in ids:
            body = {"prompt": f"{one} of the fox", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            line = {"custom_id": one, "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    out = tmp_path / "out.jsonl"

    process = start(tiny_model)
    wait(lambda: count(out) >= 10, process, tmp_path)
    left = descendants(process.pid)
    assert len(replicas_of(process)) == 2
    process.kill()
    process.wait()
    wait_for_end(left, 10)
    first = count(out)
    assert 10 <= first < 150, "the machine is too fast for the rest of the test"

    process = start(tiny_model)
    wait(lambda: count(out) >= first + 10, process, tmp_path)
    killed = replicas_of(process)[0]
    os.kill(killed, signal.SIGKILL)
    assert count(out) < len(ids)
    left = [one for one in descendants(process.pid) if one != killed]
    assert process.wait(240) == 0, (tmp_path / "log").read_text()
    wait_for_end(left, 10)

    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in found) == sorted(ids)
    assert all(one["error"] is None for one in found), [one for one in found if one["error"]][:2]
    prompts = [f"{one} of the fox" for one in ids]
    with Engine(EngineConfig(model=str(tiny_model), dtype="float32", warmup="lazy", graph_manifest="none")) as engine:
        params = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
        wanted = [output.text for output in engine.generate(prompts, params, use_tqdm=False)]
    by_id = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in found}
    assert [by_id[one] for one in ids] == wanted


@pytest.mark.slow
def test_replicas_that_can_not_start_end_the_batch_with_the_reason(start: Start, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n')
    process = start(Path("/no/such/model"))
    assert process.wait(240) == 2
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert "the replicas do not start" in last and "no such file or folder: /no/such/model" in last
