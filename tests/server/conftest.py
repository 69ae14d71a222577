"""Fixtures: real servers on free ports with a real engine on the tiny model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from engine.client.async_client import make_client
from engine.config import EngineConfig
from server.app import create_app
from server.config import ServerConfig
from server.keys import Keys
from server.serving.service import Service
from server.workers.http_server import listen, uvicorn_config
from tests.support.waiting import wait


@dataclass
class RunningServer:
    """A server in its own thread: its URL, its service, and an HTTP client."""

    url: str
    service: Service
    http: httpx.Client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def answer(self, path: str, body: Any) -> Any:
        """POST and return the JSON of the response, which must be 200."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: Any) -> list[Any]:
        """POST and return the JSON of each event of the stream, which must end with [DONE]."""
        with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        samples = [
            sample
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert samples, f"/metrics has no {name} with {labels}"
        return sum(sample.value for sample in samples)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition` holds."""
        wait(condition, what)

    def wait_idle(self) -> None:
        """Wait until no sequence is in flight, in the server or in the engine."""

        def idle() -> bool:
            stats = self.service.client.stats()
            return self.service.admission.in_flight == 0 and stats.num_running == 0 and stats.num_waiting == 0

        self.wait(idle, "idleness")


@contextmanager
def running(config: ServerConfig, wait_ready: bool = True) -> Iterator[RunningServer]:
    client = make_client(config.engine, in_process=config.in_process)
    app = create_app(client, config, keys=Keys.load(config, {}))
    listener = listen(config.host, 0)
    server = uvicorn.Server(uvicorn_config(app, config))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    url = "http://{}:{}".format(*listener.getsockname())
    try:
        with httpx.Client(base_url=url) as http:
            handle = RunningServer(url, app.state.service, http)
            handle.wait(lambda: server.started, "the server's start")
            if wait_ready:
                handle.wait(lambda: http.get("/ready").status_code == 200, "readiness")
            yield handle
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def tiny_config(folder: Path, **settings: Any) -> ServerConfig:
    own = {"served_model_name": ("tiny",), "max_waiting": 64, "in_process": True}
    engine = {
        "model": str(folder), "dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_model_len": 256,
        "warmup": "lazy", "graph_manifest": "none",
    }  # fmt: skip
    for name, value in settings.items():
        (own if name in ServerConfig.__dataclass_fields__ else engine)[name] = value
    return ServerConfig(engine=EngineConfig(**engine), **own)


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[RunningServer]:
    """A server shared by most tests."""
    with running(tiny_config(tiny_model)) as handle:
        yield handle


@pytest.fixture(scope="session")
def long_server(tiny_model: Path) -> Iterator[RunningServer]:
    """A server with a context long enough to disconnect from a running request."""
    with running(tiny_config(tiny_model, max_model_len=4096)) as handle:
        yield handle


@pytest.fixture
def start_server(tiny_model: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start a private server with settings as keywords. With `wait_ready=False` don't wait for the model."""
    with ExitStack() as stack:

        def start(wait_ready: bool = True, **settings: Any) -> RunningServer:
            return stack.enter_context(running(tiny_config(tiny_model, **settings), wait_ready))

        yield start
