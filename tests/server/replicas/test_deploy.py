"""`serve deploy` of the shipped configuration on a real Ray head, with a tiny model."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.soak.serving import ENVIRONMENT
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

pytest.importorskip("ray", reason="replicas run on Ray")
ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
TOKEN = secrets.token_hex(32)  # of the test's cluster: Ray asks for one
CLUSTER = ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


@pytest.fixture
def head() -> Iterator[str]:
    """The address of the dashboard of a Ray head, whose processes end with the test."""
    port, dashboard = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # a short path: Ray's sockets lie below it
        words = [
            BIN / "ray", "start", "--head", "--block", "--num-cpus", "4", "--temp-dir", folder, "--port", str(port),
            "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard), "--disable-usage-stats",
            "--node-ip-address", "127.0.0.1", "--object-store-memory", str(100 << 20),
        ]  # fmt: skip
        process = subprocess.Popen(list(map(str, words)), env=CLUSTER, cwd=ROOT, start_new_session=True)
        address = f"http://127.0.0.1:{dashboard}"
        try:
            answers(f"{address}/api/version", 90, headers={"Authorization": f"Bearer {TOKEN}"})
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            finally:
                os.killpg(process.pid, signal.SIGKILL)


def answers(url: str, seconds: float, **options: object) -> httpx.Response:
    """Return the first answer with status 200."""
    end, last = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        try:
            found = httpx.get(url, timeout=10, **options)  # type: ignore[arg-type]
            if found.status_code == 200:
                return found
            last = f"{found.status_code} {found.text[:200]}"
        except httpx.TransportError as error:
            last = repr(error)
        time.sleep(0.3)
    raise AssertionError(f"{url} gave no answer within {seconds} s: {last}")


@pytest.mark.slow
def test_the_shipped_configuration_is_deployed(head: str, tiny_model: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text("utf-8"))
    port = free_port()
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    [app] = config["applications"]
    app["runtime_env"]["env_vars"] |= {
        "ENCORE_API_KEYS": "sk-one",
        "PYTHONPATH": ENVIRONMENT.get("PYTHONPATH", str(ROOT)),
    }
    app["args"] |= {
        "model": str(tiny_model), "max_replicas": 2, "drain_seconds": 2, "warmup": "lazy", "num_threads": 1,
        "dtype": "float32", "device": "cpu", "max_model_len": 512, "in_process": True,
    }  # fmt: skip
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [str(BIN / "serve"), "deploy", "--address", head, str(path)], env=CLUSTER, cwd=ROOT,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    url, key = f"http://127.0.0.1:{port}", {"Authorization": "Bearer sk-one"}
    assert len(answers(f"{url}/ready", 150).json()["replicas"]) >= 1
    body = {"prompt": "red fox", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=PATIENCE)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).status_code == 401
