"""Replicas follow the load, without a failed request."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.replicas.test_replicas import FLAGS, complete, replicas, wait
from tests.soak.serving import ENVIRONMENT, serving
from tests.support.ports import free_port

pytest.importorskip("ray", reason="replicas run on Ray")


@pytest.mark.slow
def test_replicas_are_added_and_removed_under_load_without_a_failed_request(tiny_model: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--replicas", "1", "--max-replicas", "3", "--target-requests", "2", "--max-model-len", "2048")
    outcomes: Counter[str] = Counter()
    seen: set[int] = set()
    heavy, light = threading.Event(), threading.Event()
    with serving(tiny_model, tmp_path / "server.log", *flags) as server:

        def ask(number: int, stop: threading.Event) -> None:
            while not stop.is_set():
                try:
                    answer = complete(server, f"{number} dogs", max_tokens=200)
                    outcomes[str(answer.status_code)] += 1
                except httpx.TransportError as error:
                    outcomes[repr(error)] += 1

        with ThreadPoolExecutor(12) as pool:
            tasks = [pool.submit(ask, number, light if number == 0 else heavy) for number in range(12)]
            try:
                wait(lambda: len(replicas(server)) == 3, "three replicas", 240)
                heavy.set()

                def is_one() -> bool:
                    seen.add(len(replicas(server)))
                    return 1 in seen

                wait(is_one, "one replica", 400)
            finally:
                heavy.set()
                light.set()
            for task in tasks:
                task.result()
    assert set(outcomes) == {"200"}, outcomes


@pytest.mark.slow
def test_a_rolling_upgrade_fails_no_request(tiny_model: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.server.replicas.upgrade", str(tiny_model), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert set(outcomes) == {"one", "two"}, outcomes
