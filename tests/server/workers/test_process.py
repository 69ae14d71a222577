"""`encore serve` as a process: startup, signals, exit status, and error messages when it can't start."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from engine.client.async_client import make_client
from engine.config import EngineConfig
from engine.errors import ConfigError
from server.app import create_app
from server.config import ServerConfig
from server.http.connections import OpenConnections
from server.keys import Keys
from server.launch import serve
from server.workers.http_server import Acceptor, Server, open_listener, uvicorn_config
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until, wait, wait_for_end

Serve = Callable[..., subprocess.Popen[str]]
COMMON = ("--port", "0", "--max-model-len", "4096", "--graph-manifest", "none")
ENDLESS = {"text": "red", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": True}


def started(start: Serve, model: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server, wait until its model is loaded, and return the process and its URL."""
    process = start(*COMMON, "--model", str(model), "--num-threads", "1", *arguments)
    lines = []
    while not lines or "serving " not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)
    return process, re.search(r"http://127\.0\.0\.1:\d+", "".join(lines)).group()


@pytest.fixture
def start() -> Iterator[Serve]:
    """Start `encore serve` with these arguments; kill it after the test if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str) -> subprocess.Popen[str]:
        ours = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and a server would inherit that
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "server.cli", "serve", *arguments], stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        finally:
            signal.signal(signal.SIGHUP, ours)
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_lets_a_stream_finish_and_exits_with_0(
    start: Serve, tiny_model: Path, number: signal.Signals
) -> None:
    process, url = started(start, tiny_model)
    engine = children(process.pid)
    body = {"text": "red", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}
    with httpx.stream("POST", url + "/generate", json=body, timeout=PATIENCE) as response:
        events = response.iter_lines()
        next(events)
        for pid in (*engine, process.pid):
            os.kill(pid, number)
        rest = [line for line in events if line]
    assert rest[-1] == "data: [DONE]" and '"type":"length"' in rest[-2]
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    assert "draining" in log and "Traceback" not in log
    assert engine
    wait_for_end(engine)


def test_while_it_drains_new_requests_are_a_503_and_a_second_signal_ends_it_at_once(
    start: Serve, tiny_model: Path
) -> None:
    process, url = started(start, tiny_model, "--drain-seconds", "3600", "--in-process")
    with (
        httpx.Client(base_url=url) as http,
        http.stream("POST", "/generate", json=ENDLESS) as response,
    ):
        events = response.iter_lines()
        next(events)
        process.send_signal(signal.SIGTERM)
        while httpx.get(url + "/ready").status_code == 200:
            time.sleep(0.01)
        assert httpx.get(url + "/ready").json()["reasons"] == ["shutting down"]
        assert httpx.get(url + "/health").status_code == 200
        refused = httpx.post(url + "/v1/completions", json={"prompt": "red"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1 and refused.headers["connection"] == "close"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)  # well below the drain limit
    assert process.returncode == 0, log
    assert "stopping at once" in log and "Traceback" not in log


async def test_a_request_on_a_connection_accepted_before_shutdown_is_answered(tiny_model: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "server.workers.http_server.FIRST_REQUEST_SECONDS", 60.0
    )  # a slow machine must not fail this test
    engine = EngineConfig(model=str(tiny_model), num_threads=1, warmup="lazy", graph_manifest="none")
    config = ServerConfig(engine=engine, in_process=True, port=0)
    app = create_app(make_client(engine, in_process=True), config)
    listener = open_listener(config, Keys.load(config, {}))
    connections = OpenConnections()
    server = Server(uvicorn_config(app, config, connections), app.state.service, Acceptor(listener, connections))
    serving = asyncio.create_task(server.serve(sockets=[]))
    await until(lambda: server.started, "the start")
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    await until(lambda: server.server_state.connections, "the connection")
    server.request_shutdown(force=False)
    await until(lambda: server.should_exit, "the end of the drain")
    await asyncio.sleep(0.4)  # uvicorn polls should_exit every 0.1 s
    writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nconnection: close\r\n" in answer.lower()
    writer.close()
    await serving
    listener.close()


def test_requests_past_the_drain_limit_are_aborted_and_the_exit_is_clean(start: Serve, tiny_model: Path) -> None:
    process, url = started(start, tiny_model, "--drain-seconds", "0.3", "--log-format", "json", "--in-process")
    with httpx.stream("POST", url + "/generate", json=ENDLESS, timeout=PATIENCE) as response:
        events = response.iter_lines()
        next(events)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in events if line]
    _, log = process.communicate(timeout=PATIENCE)
    assert '"finish_reason":{"type":"abort"}' in rest[-2] and rest[-1] == "data: [DONE]", log
    assert process.returncode == 0, log
    lines = [json.loads(line) for line in log.splitlines()]
    [request] = [line for line in lines if line.get("path") == "/generate"]
    assert request["status"] == 200 and request["finish_reasons"] == {"abort": 1}
    assert request["completion_tokens"] > 0 and request["prompt_tokens"] > 0
    assert any("not answered" in line["message"] and line["level"] == "warning" for line in lines)


def test_sigint_while_loading_exits_with_0_and_leaves_no_process(start: Serve, tiny_model: Path) -> None:
    process = start("--model", str(tiny_model), "--port", "0", "--graph-manifest", "none")
    assert " loads " in process.stderr.readline()
    time.sleep(0.5)
    engine = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    wait_for_end(engine)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, "1"), (signal.SIGHUP, "1"), (signal.SIGINT, "2")])
def test_a_signal_during_the_imports_exits_with_0(start: Serve, tiny_model: Path, number: signal.Signals, workers: str):
    process = start(*COMMON, "--model", str(tiny_model), "--http-workers", workers)
    wait(lambda: number in blocked_signals(process.pid), "the first line of the program")
    process.send_signal(number)
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    assert "draining" in log and "Traceback" not in log


def test_sigterm_during_a_download_that_hangs_exits_with_0(start: Serve, tmp_path: Path, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # accepts connections and never answers
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        process = start("--model", "someone/something", "--port", "0")
        hub.settimeout(PATIENCE)
        connection, _ = hub.accept()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
        connection.close()
    assert process.returncode == 0, log  # one that waits for the hub fails when its patience ends
    assert "draining" in log and "Traceback" not in log and "error" not in log.lower()


def test_a_server_without_standard_files_serves_and_nohup_makes_it_ignore_sighup(tiny_model: Path) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(tiny_model), "--num-threads", "1",
               "--graph-manifest", "none", "--warmup", "lazy", "--port", port]  # fmt: skip
    shell = ["sh", "-c", 'trap "" HUP; exec "$@" <&- >&- 2>&-', "sh"]
    with subprocess.Popen([*shell, *command], env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            wait(lambda: process.poll() is not None or is_ready(port), "readiness")
            process.send_signal(signal.SIGHUP)
            body = {"prompt": "red", "max_tokens": 3}
            assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_a_full_pipe_as_standard_error_stops_no_process(tiny_model: Path) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(tiny_model), "--num-threads", "1",
               "--tensor-parallel-size", "2", "--graph-manifest", "none", "--log-level", "debug",
               "--port", port]  # fmt: skip
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"\n")
    os.set_blocking(writing, True)
    with subprocess.Popen(command, stderr=writing, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            wait(lambda: process.poll() is not None or is_ready(port), "readiness")
            for path in ("/v1/completions", "/v1/nothing"):
                httpx.post(f"http://127.0.0.1:{port}{path}", json={"prompt": "red", "max_tokens": 3}, timeout=PATIENCE)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_kill_while_a_hung_engine_starts_ends_the_engine_and_its_ranks(start: Serve, tiny_model: Path, ranks: str):
    flags = ("--tensor-parallel-size", ranks, "--warmup", "full", "--max-num-seqs", "64")
    process = start(*COMMON, "--model", str(tiny_model), *flags)
    url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline()).group()
    wait(lambda: children(process.pid), "the engine")
    [engine] = children(process.pid)
    if ranks == "1":
        wait(lambda: "graphs are being captured" in httpx.get(url + "/ready").text, "the warm-up")
    else:
        # A child unblocks the signals once the kernel is to end it with its parent.
        wait(lambda: [pid for pid in children(engine) if signal.SIGTERM not in blocked_signals(pid)], "the other rank")
    pids = [engine, *children(engine)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    wait_for_end(pids)


def never_ready(config: EngineConfig, receive: object, send: object) -> None:
    """An engine process that loads for ever."""
    time.sleep(3600)


async def test_a_port_in_use_fails_before_the_model_is_loaded(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 port {port}"):
            config = ServerConfig(engine=EngineConfig(model=str(tiny_model)), port=port)
            await asyncio.wait_for(serve(config, never_ready), PATIENCE)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_keys_of_the_environment_do_not_reach_other_processes(start: Serve, tiny_model: Path, monkeypatch, workers):
    monkeypatch.setenv("ENCORE_API_KEYS", "sk-qzvx-inference")
    monkeypatch.setenv("ENCORE_ADMIN_KEYS", "sk-qzvx-admin")
    process, url = started(start, tiny_model, "--http-workers", workers)
    found = children(process.pid)
    assert len(found) >= int(workers)
    for pid in found:
        assert b"sk-qzvx" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert httpx.get(url + "/v1/models").status_code == 401
    assert httpx.get(url + "/v1/models", headers={"Authorization": "Bearer sk-qzvx-inference"}).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


def test_a_missing_model_is_exit_status_2_and_is_named(start: Serve, tmp_path: Path) -> None:
    process = start("--model", str(tmp_path / "missing"), "--port", "0")
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    started, error = log.splitlines()
    assert " loads " in started and error.startswith("encore serve: error: ") and "missing" in error


def children(pid: int) -> list[int]:
    """Return the child processes started by any thread."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


def blocked_signals(pid: int) -> set[int]:
    """Return the signals that the main thread blocks."""
    [line] = re.findall(r"^SigBlk:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return {number for number in range(1, 65) if int(line, 16) >> (number - 1) & 1}


def is_ready(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").is_success
    except httpx.TransportError:
        return False
