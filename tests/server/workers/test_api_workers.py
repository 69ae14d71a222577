"""`encore serve --http-workers N` as processes: one port, one engine, and recovery when a process ends."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from engine.client.supervisor import RestartPolicy
from engine.config import EngineConfig
from engine.utils.processes.child import running_children
from server.config import ServerConfig
from server.keys import Keys
from server.workers.http_server import listen
from server.workers.manager import WorkerManager
from tests.soak.serving import ENVIRONMENT, Serving, command_of, serving
from tests.support.waiting import PATIENCE, until, wait, wait_for_end

FLAGS = ("--dtype", "float32", "--num-threads", "1", "--warmup", "lazy", "--max-model-len", "4096")
SHORT = {"prompt": "red fox", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True,
         "stream_options": {"include_usage": True}}  # fmt: skip
RECOMMENDED = {"temperature": 0.4, "top_k": 5}
ENDLESS = SHORT | {"max_tokens": 4000}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A shared server with two API workers. Every test leaves both alive and the engine idle."""
    folder = tmp_path_factory.mktemp("api_workers")
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    flags = (*FLAGS, "--http-workers", "2", "--max-num-seqs", "16", "--generation-config", str(folder))
    with serving(tiny_model, folder / "server.log", *flags) as handle:
        yield handle


def children(pid: int) -> list[int]:
    """Child processes started by any thread."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread or child that has just ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def api_workers(server: Serving) -> list[int]:
    return [pid for pid in children(server.process.pid) if "API worker" in command_of(pid)]


def connections_of(pid: int) -> int:
    """Number of established TCP connections of a process."""
    links = (os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir())
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and row[9] in inodes for row in rows)


def wait_ready(server: Serving) -> None:
    def both() -> bool:
        return len(api_workers(server)) == 2 and all(httpx.get(server.url + "/ready").is_success for _ in range(6))

    wait(both, "readiness")


def wait_idle(server: Serving) -> None:
    names = [f"num_requests_{what}" for what in ("running", "waiting", "in_flight")]
    wait(lambda: not any(map(server.metric, names)), "idleness")


class Stream(threading.Thread):
    """A streaming client on its own connection. Records the events received and how the stream ended."""

    def __init__(self, server: Serving, body: dict, **headers: str):
        super().__init__(daemon=True)
        self.url, self.body, self.headers = server.url + "/v1/completions", body, headers
        self.events: list[dict] = []
        self.status, self.is_done, self.broke = 0, False, False
        self.leave = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, headers=self.headers, timeout=PATIENCE) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.is_done = True
                    elif line:
                        self.events.append(json.loads(line.removeprefix("data: ")))
                    if self.leave.is_set():
                        return
        except httpx.TransportError:
            self.broke = True

    @property
    def text(self) -> str:
        return "".join(choice["text"] for one in self.events for choice in one.get("choices", ()))


def streams_of_both(server: Serving, body: dict) -> list[Stream]:
    """Start at least 8 streams, and as many as it takes until both workers have some; wait for their first tokens.

    The system may let one worker wait for the processor while the other accepts everything.
    """
    streams: list[Stream] = []

    def both_have_some() -> bool:
        streams.append(Stream(server, body))
        wait(lambda: streams[-1].events, "the first token")
        return len(streams) >= 8 and all(map(connections_of, api_workers(server)))

    wait(both_have_some, "a stream of each worker")
    return streams


def test_api_workers_share_connections_and_sum_their_counters(server):
    answered = server.metric("http_responses_total")
    ended = server.metric("request_success_total")
    streams = streams_of_both(server, ENDLESS)
    held = [connections_of(pid) for pid in api_workers(server)]
    assert len(held) == 2 and sum(held) >= len(streams) and min(held) >= 1
    assert server.metric("num_requests_in_flight") == len(streams)
    for stream in streams:
        stream.leave.set()
        stream.join()
    left = len(streams)
    wait_idle(server)

    streams = [Stream(server, SHORT) for _ in range(8)]
    for stream in streams:
        stream.join(PATIENCE)
        assert stream.is_done and stream.events[-1]["usage"]["completion_tokens"] == 40
    assert len({stream.text for stream in streams}) == 1
    wait_idle(server)
    seen = [server.metric("request_success_total") for _ in range(6)]
    assert seen == [ended + left + 8] * 6  # from any worker
    assert server.metric("time_to_first_token_seconds_count") >= 16
    assert server.metric("http_responses_total") >= answered + 16 + 6
    assert {httpx.get(server.url + "/v1/models").text for _ in range(6)} == {httpx.get(server.url + "/v1/models").text}


def test_every_worker_knows_the_models_sampling_defaults(server):
    found = [httpx.get(server.url + "/v1/models").json()["data"][0]["sampling_defaults"] for _ in range(6)]
    assert found == [RECOMMENDED] * 6


def test_every_worker_sends_openmetrics_when_asked_for(server):
    for _ in range(4):
        text = httpx.get(server.url + "/metrics", headers={"Accept": "application/openmetrics-text"}).text
        assert text.endswith("# EOF\n") and "encore_engine_up" in {one.name for one in parse_openmetrics(text)}


def test_concurrent_requests_with_the_same_id_get_their_own_responses(server):
    texts = ["red fox", "blue bird", "old king", "the sun"]

    def ask(number: int) -> str:
        body = {"prompt": texts[number % 4], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            server.url + "/v1/completions", json=body, headers={"X-Request-Id": "same"}, timeout=PATIENCE
        )
        return answer.json()["choices"][0]["text"]

    alone = [ask(number) for number in range(4)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone * 4


def test_a_worker_that_ends_breaks_only_its_own_streams_and_is_replaced(server):
    wait_ready(server)
    before = server.metric("request_success_total")
    expected = Stream(server, ENDLESS | {"max_tokens": 1500})
    expected.join(PATIENCE)
    streams = streams_of_both(server, ENDLESS | {"max_tokens": 1500})
    victim, other = api_workers(server)
    os.kill(victim, signal.SIGKILL)
    wait(lambda: any(stream.broke for stream in streams), "the end of its streams")
    wait(lambda: server.metric("num_requests_in_flight") < len(streams), "its queue capacity")
    for stream in streams:
        stream.join(PATIENCE)
    whole = [stream for stream in streams if stream.is_done]
    assert 1 <= len(whole) < len(streams) and all(stream.broke for stream in streams if stream not in whole)
    assert {stream.text for stream in whole} == {expected.text}
    wait_ready(server)
    assert other in api_workers(server) and victim not in api_workers(server)
    wait_idle(server)
    assert server.metric("engine_restarts_total") == 0
    # The counts of the lost worker remain. The ends of its broken streams were never counted.
    assert server.metric("request_success_total") == before + 1 + len(whole)
    Stream(server, SHORT).join(PATIENCE)


def test_all_workers_see_an_engine_restart_and_its_counters_continue(server):
    wait_ready(server)
    streams = [Stream(server, ENDLESS) for _ in range(6)]
    wait(lambda: all(stream.events for stream in streams), "the first tokens")
    wait(lambda: server.metric("num_requests_running") == 6, "a report of them")
    generated = server.metric("generation_tokens_total")
    os.kill(server.engine_pid, signal.SIGKILL)
    for stream in streams:
        stream.join(PATIENCE)
        assert stream.is_done and stream.events[-1]["error"]["code"] == "engine_dead"

    def all_refuse() -> bool:  # the report reaches one worker after the other
        found = [httpx.get(server.url + "/ready") for _ in range(6)]
        return all(one.status_code == 503 and "being restarted" in one.json()["reasons"][0] for one in found)

    wait(all_refuse, "the restart's begin")
    wait_ready(server)
    assert [server.metric("engine_restarts_total") for _ in range(6)] == [1] * 6
    assert all(server.metric("generation_tokens_total") >= generated for _ in range(6))
    assert server.metric("num_requests_in_flight") == 0
    # A worker that starts afterwards reports it too.
    victim = api_workers(server)[0]
    os.kill(victim, signal.SIGKILL)
    wait(lambda: victim not in api_workers(server), "its end")
    wait_ready(server)
    assert [server.metric("engine_restarts_total") for _ in range(6)] == [1] * 6
    assert all(server.metric("generation_tokens_total") >= generated for _ in range(6))


def test_the_queue_is_bounded_over_all_workers_and_sigterm_drains_them(tiny_model, tmp_path):
    limits = ("--max-num-seqs", "2", "--max-waiting", "1", "--http-workers", "2", "--drain-seconds", "3600")
    with serving(tiny_model, tmp_path / "server.log", *FLAGS, *limits) as server:
        wait_ready(server)
        streams = [Stream(server, ENDLESS | {"max_tokens": 2500}) for _ in range(2)]
        wait(lambda: all(stream.events for stream in streams), "the first tokens")
        streams.append(Stream(server, ENDLESS | {"max_tokens": 2500}))
        wait(lambda: server.metric("num_requests_in_flight") == 3, "the third request")
        for _ in range(6):
            assert httpx.post(server.url + "/v1/completions", json=SHORT).status_code == 429
        pids = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        wait(lambda: not httpx.get(server.url + "/ready").is_success, "the drain")
        assert httpx.post(server.url + "/v1/completions", json=SHORT).json()["error"]["code"] == "draining"
        for stream in streams:
            stream.join(3 * PATIENCE)
            assert stream.is_done and stream.events[-1]["usage"]["completion_tokens"] == 2500
        assert server.process.wait(PATIENCE) == 0
        wait_for_end(pids)
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_every_worker_reads_the_responses_that_any_has_stored(server):
    wait_ready(server)
    url, previous = server.url + "/v1/responses", None
    for text in ("red", "blue", "green", "grey"):  # each on a connection of its own, so that both workers get some
        body = {"input": text, "max_output_tokens": 2, "previous_response_id": previous}
        answer = httpx.post(url, json=body, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
    items = [httpx.get(f"{url}/{previous}/input_items?order=asc").json()["data"] for _ in range(6)]
    texts = [item["content"][0]["text"] for item in items[0] if item["role"] == "user"]
    assert texts == ["red", "blue", "green", "grey"] and all(one == items[0] for one in items)
    assert {server.metric("stored_responses") for _ in range(6)} == {4.0}
    assert httpx.delete(f"{url}/{previous}").json()["deleted"]
    assert {httpx.get(f"{url}/{previous}").status_code for _ in range(6)} == {404}


def test_every_worker_reads_and_cancels_background_responses(server):
    body = {"input": "red", "max_output_tokens": 3000, "ignore_eos": True, "background": True, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE) as first,
        first.stream("POST", "/v1/responses", json=body) as sse,
    ):
        events = (json.loads(line[6:]) for line in sse.iter_lines() if line.startswith("data: "))
        name = next(events)["response"]["id"]
    statuses = set()
    for _ in range(8):  # each on a new connection: both workers are asked
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as one:
            statuses.add(one.get(f"/v1/responses/{name}").json()["status"])
    assert statuses <= {"queued", "in_progress"}
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as one:
        assert one.post(f"/v1/responses/{name}/cancel").json()["status"] == "cancelled"
    wait_idle(server)
    for _ in range(4):
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as one:
            assert one.get(f"/v1/responses/{name}").json()["status"] == "cancelled"
            text = one.get(f"/v1/responses/{name}", params={"stream": True}).text
            assert text.startswith("event: response.created") and "response.completed" not in text


def test_a_replacement_worker_takes_new_keys_and_is_retried_until_it_can_serve(tiny_model, tmp_path):
    model, keys = tmp_path / "model", tmp_path / "keys"
    shutil.copytree(tiny_model, model)
    keys.write_text("right\n")
    with serving(model, tmp_path / "server.log", *FLAGS, "--http-workers", "2", "--api-key-file", str(keys)) as server:
        wait_ready(server)
        keys.write_text("another\n")
        url, another = server.url + "/v1/models", {"Authorization": "Bearer another"}
        wait(lambda: all(httpx.get(url, headers=another).is_success for _ in range(6)), "the new key")
        model.rename(tmp_path / "away")
        os.kill(api_workers(server)[0], signal.SIGKILL)
        wait(lambda: "this API worker can't serve" in (tmp_path / "server.log").read_text(), "a failed worker")
        (tmp_path / "away").rename(model)  # soon: a worker is replaced a few times only
        wait_ready(server)
        assert all(httpx.get(url, headers=another).is_success for _ in range(6))
        assert {httpx.get(url, headers={"Authorization": "Bearer right"}).status_code for _ in range(6)} == {401}


def test_a_signal_to_the_process_group_during_startup_exits_cleanly(tiny_model, tmp_path):
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(tiny_model), "--port", "0", *FLAGS,
               "--http-workers", "2"]  # fmt: skip
    log = tmp_path / "server.log"
    with log.open("wb") as lines:
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=lines, start_new_session=True)
    wait(lambda: len(children(process.pid)) == 3, "the processes")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE) == 0
    assert "draining" in log.read_text() and "Traceback" not in log.read_text()


def worker_pids() -> list[int]:
    """Process ids of the API workers started by this process."""
    return [child.pid for child in running_children() if child.name.startswith("API worker")]


async def test_only_a_hung_worker_is_replaced_and_a_failed_start_is_retried(tiny_model, caplog):
    engine = EngineConfig(model=str(tiny_model), dtype="float32", num_threads=1, warmup="lazy", graph_manifest="none")
    listener = listen("127.0.0.1", 0)
    listener.listen(16)
    listener.setblocking(False)
    main = WorkerManager(ServerConfig(engine=engine, http_workers=2), listener, Keys(),
                  policy=RestartPolicy(kill_seconds=4.0, first_delay=0.05))  # fmt: skip
    caplog.set_level("INFO", "encore.server")
    ending = asyncio.create_task(main.serve())
    try:
        await until(lambda: "serving" in caplog.text, "readiness")
        pids = worker_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5.0)  # as if all processes had been frozen: the supervision runs again before the workers do
        await asyncio.sleep(0.2)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert worker_pids() == pids

        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.kill(pids[0], signal.SIGSTOP)  # this one hangs
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            await until(lambda: "could not be started" in caplog.text, "a failed start")
            assert "does not respond and is killed" in caplog.text
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await until(lambda: len(worker_pids()) == 2, "the replacement")
        assert pids[1] in worker_pids() and pids[0] not in worker_pids() and not ending.done()
    finally:
        main.on_signal(signal.SIGTERM)
        await ending
        listener.close()


def test_workers_and_engine_exit_when_the_main_process_dies(tiny_model, tmp_path):
    with serving(tiny_model, tmp_path / "server.log", *FLAGS, "--http-workers", "2") as server:
        wait_ready(server)
        pids = children(server.process.pid)
        assert len(pids) == 3
        server.process.kill()
        wait_for_end(pids)


def test_a_missing_model_ends_all_processes_with_status_2(tmp_path):
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(tmp_path / "missing"), "--port", "0",
               "--http-workers", "2"]  # fmt: skip
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    begun, *_, error = done.stderr.splitlines()
    assert "API workers: 2" in begun and error.startswith("encore serve: error: ") and "missing" in error
    assert "Traceback" not in done.stderr
