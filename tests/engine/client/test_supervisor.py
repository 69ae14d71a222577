"""Engine processes that die, hang or can't restart: what is restarted, and which errors and reports follow."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from engine.client.async_client import EngineClient, make_client
from engine.client.counters import add_totals, totals_after_exit
from engine.client.supervisor import RestartPolicy, Supervisor
from engine.client.transport import ProcessTransport
from engine.errors import ConfigError, EngineDead, ModelError
from engine.protocol.messages import Dead, EngineStats, Events, Lost, Ready, Snapshot, Stop
from engine.protocol.request import SamplingParams
from tests.support.waiting import PATIENCE, is_alive, until

LONG = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
FAST = RestartPolicy(first_delay=0.05)


@asynccontextmanager
async def started(client: EngineClient):
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def tokens_of(client: EngineClient, request_id: str, params: SamplingParams = SHORT) -> list[int]:
    return [
        token
        async for delta in client.generate(request_id, prompt_token_ids=[5, 9, 200], params=params)
        for token in delta.token_ids
    ]


def supervised(config, policy: RestartPolicy) -> tuple[EngineClient, Supervisor]:
    supervisor = Supervisor(lambda: ProcessTransport(config), policy)
    return EngineClient(config, supervisor), supervisor


def set_kill_seconds(policy: RestartPolicy, seconds: float) -> None:
    """Change a policy in use: a process that is merely slow must not be killed before it hangs."""
    object.__setattr__(policy, "kill_seconds", seconds)


async def test_a_killed_process_fails_its_requests_and_is_replaced(config):
    client, supervisor = supervised(config(max_model_len=4096), FAST)
    async with started(client):
        expected = await tokens_of(client, "a")
        await until(lambda: client.stats().ended.get("length") == 1, "the count")
        counted, pid = client.stats(), supervisor.pid
        running = [asyncio.create_task(tokens_of(client, f"long-{n}", LONG)) for n in range(3)]
        await until(lambda: client.stats().num_running == 3, "the load")
        asked = asyncio.create_task(client.ask("graphs"))
        os.kill(pid, signal.SIGKILL)
        ended = await asyncio.wait_for(asyncio.gather(*running, asked, return_exceptions=True), PATIENCE)
        assert all(isinstance(one, EngineDead) for one in ended[:3])
        health = client.health()
        assert health.alive and not health.ready and health.restarts == 1
        assert "exit code -9" in health.reason and "being restarted" in health.reason
        assert client.stats().num_running == 0 and client.stats().kv_cache_usage == 0
        with pytest.raises(EngineDead, match="being restarted"):
            await tokens_of(client, "meanwhile")
        await until(lambda: client.health().ready, "the restart")
        assert supervisor.pid != pid and client.health().reason == ""
        assert await tokens_of(client, "a") == expected
        await until(lambda: client.stats().ended.get("length", 0) >= 2, "the counts of both processes")
        assert client.stats().generation_tokens >= counted.generation_tokens + 4
        assert client.stats().prompt_tokens >= counted.prompt_tokens + 3
        assert client.num_pending == 0
    with pytest.raises(ProcessLookupError):
        os.kill(supervisor.pid, 0)


async def test_a_silent_process_is_not_ready_and_is_replaced_after_kill_seconds(config):
    policy = RestartPolicy(first_delay=0.05)
    client, supervisor = supervised(config(max_model_len=4096), policy)
    async with started(client):
        pid = supervisor.pid
        os.kill(pid, signal.SIGSTOP)
        client.hang_seconds = 0.5
        await until(lambda: not client.health().ready, "the hang to show")
        os.kill(pid, signal.SIGCONT)
        await until(lambda: client.health().ready, "the recovery")
        assert supervisor.pid == pid and client.health().restarts == 0

        running = asyncio.create_task(tokens_of(client, "long", LONG))
        await until(lambda: client.stats().num_running == 1, "the load")
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: not client.health().ready, "the hang to show")
        assert client.health().alive and "not reported" in client.health().reason
        assert not running.done() and is_alive(pid)  # the process may still resume
        set_kill_seconds(policy, 2.0)
        with pytest.raises(EngineDead, match=r"hung: no report for \d+ s"):
            await running
        set_kill_seconds(policy, PATIENCE)
        client.hang_seconds = PATIENCE
        await until(lambda: client.health().ready, "the restart")
        assert supervisor.pid != pid and len(await tokens_of(client, "next")) == 4


async def test_sending_commands_does_not_block_on_a_stopped_process(config):
    client, supervisor = supervised(config(max_model_len=4096), FAST)
    async with started(client):
        pid = supervisor.pid
        os.kill(pid, signal.SIGSTOP)
        waiting = []
        for n in range(200):  # about 2 MB of commands: many times what a pipe holds
            stream = client.generate(f"r{n}", prompt_token_ids=[300] * 4000, params=SHORT)
            waiting.append((stream, asyncio.create_task(anext(stream))))
            await asyncio.sleep(0)
        assert supervisor.pid == pid and is_alive(pid)  # a command that waits for it would wait until it is killed
        os.kill(pid, signal.SIGCONT)
        for stream, first in waiting:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await stream.aclose()
        assert len(await tokens_of(client, "after")) == 4


async def test_a_model_rejected_at_a_restart_is_not_retried(config, lively_model, tmp_path):
    folder = tmp_path / "model"
    folder.symlink_to(lively_model)
    client, supervisor = supervised(config(model=str(folder)), FAST)
    async with started(client):
        folder.unlink()
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: not client.health().alive, "the end")
        assert str(folder) in client.health().reason and client.health().restarts == 1


async def test_a_rejected_first_start_raises_in_the_caller(config, tmp_path):
    client = make_client(config(model=str(tmp_path / "missing")))
    with pytest.raises(ModelError):
        await client.start()
    client = make_client(config(num_pages=1), restarts=FAST)
    with pytest.raises(ConfigError):
        await client.start()
    assert not client.health().alive and client.health().restarts == 0


# ---- the parts -----------------------------------------------------------------------------------------------------


class ScriptedTransport:
    """A transport that sends a list of reports on start, without an engine."""

    def __init__(self, reports: list[object]):
        self.reports, self.stopped, self.killed, self.pid = reports, False, False, None

    def start(self, on_report) -> None:
        self.on_report = on_report
        for report in self.reports:
            on_report(report)

    def send(self, command) -> None:
        raise EngineDead("a script takes no commands")

    def stop(self, timeout: float) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.killed = True
        self.on_report(Dead("the engine process ended with exit code -9"))


@pytest.fixture
def scripted() -> Iterator[Callable[..., tuple[list[ScriptedTransport], queue.SimpleQueue]]]:
    running: list[Supervisor] = []

    def run(*scripts: list[object], **policy: float) -> tuple[list[ScriptedTransport], queue.SimpleQueue]:
        transports: list[ScriptedTransport] = []
        rest = iter(scripts)

        def make() -> ScriptedTransport:
            if transports:
                assert transports[-1].stopped  # its memory must be free before the next process starts
            transports.append(ScriptedTransport(next(rest, [])))  # the last ones never load
            return transports[-1]

        reports: queue.SimpleQueue = queue.SimpleQueue()
        running.append(Supervisor(make, RestartPolicy(**({"first_delay": 0.01} | policy))))
        running[-1].start(reports.put)
        return transports, reports

    run.supervisors = running
    yield run
    for supervisor in running:
        supervisor.stop(1.0)


READY, CRASHED = Ready(info=None), Dead("it crashed")


def test_an_exit_before_the_first_ready_is_final(scripted):
    _, reports = scripted([CRASHED])
    assert reports.get(timeout=PATIENCE) == CRASHED


def test_an_exit_during_a_restart_counts_as_another_restart(scripted):
    transports, reports = scripted([READY, CRASHED], [CRASHED], [READY], max_restarts=5)
    found = [reports.get(timeout=PATIENCE) for _ in range(4)]
    assert found == [READY, Lost("it crashed", restarts=1), Lost("it crashed", restarts=2), READY]
    assert [script.stopped for script in transports] == [True, True, False]


def test_too_many_exits_are_final_and_give_the_reason(scripted):
    transports, reports = scripted([READY, CRASHED], [READY, CRASHED], max_restarts=1)
    found = [reports.get(timeout=PATIENCE) for _ in range(4)]
    assert found[:3] == [READY, Lost("it crashed", restarts=1), READY]
    assert isinstance(found[3], Dead) and len(transports) == 2
    assert "it crashed; restarted 1 times within 600 s" in found[3].reason and "not restarted again" in found[3].reason


def test_stopping_during_the_restart_delay_starts_no_process(scripted):
    others = set(threading.enumerate())
    transports, reports = scripted([READY, CRASHED], [READY], first_delay=PATIENCE)
    assert [type(reports.get(timeout=PATIENCE)) for _ in range(2)] == [Ready, Lost]
    scripted.supervisors[0].stop(PATIENCE)
    assert len(transports) == 1
    assert not [one for one in set(threading.enumerate()) - others if one.name == "encore-supervisor"]


def test_a_process_that_can_not_be_started_is_stopped_without_an_error(config):
    supervisor = Supervisor(lambda: ProcessTransport(config(), run=lambda *_: None), FAST)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):  # a spawned process can't import it
        supervisor.start(lambda report: None)
    with pytest.raises(EngineDead):
        supervisor.send(Stop())
    supervisor.stop(1.0)


def test_a_restart_outside_the_window_is_forgotten(scripted):
    _, reports = scripted(
        [READY, CRASHED], [READY, CRASHED], [READY], max_restarts=1, window_seconds=0.05, first_delay=0.1
    )
    found = [reports.get(timeout=PATIENCE) for _ in range(5)]
    assert found[3] == Lost("it crashed", restarts=2) and found[4] == READY


def test_only_a_loaded_process_is_killed_for_silence(scripted):
    transports, reports = scripted([READY, CRASHED], [], [READY], kill_seconds=0.3)
    assert [type(reports.get(timeout=PATIENCE)) for _ in range(2)] == [Ready, Lost]
    time.sleep(0.8)
    assert len(transports) == 2 and not transports[1].killed
    transports[1].on_report(READY)
    assert reports.get(timeout=PATIENCE) == READY
    lost = reports.get(timeout=PATIENCE)
    assert transports[1].killed and "hung" in lost.reason and lost.restarts == 2
    assert reports.get(timeout=PATIENCE) == READY


def test_any_report_resets_the_silence_timer(scripted):
    transports, reports = scripted([READY], kill_seconds=3.0)
    end = time.monotonic() + 4.5
    while time.monotonic() < end:
        transports[0].on_report(Events([]))
        time.sleep(0.05)
    assert not transports[0].killed


def test_restart_delays_double_up_to_the_limit_and_invalid_values_are_rejected():
    policy = RestartPolicy(first_delay=1, max_delay=10)
    assert [policy.delay(recent) for recent in (0, 1, 2, 3, 4, 2000)] == [1, 2, 4, 8, 10, 10]
    for invalid in ({"kill_seconds": -1}, {"first_delay": float("nan")}):
        with pytest.raises(ConfigError):
            RestartPolicy(**invalid)


def snapshot(scale: int) -> EngineStats:
    graphs = {
        "replays": [(("decode", "block", "decode", 8), 5 * scale)], "real_tokens": [(("decode",), 30 * scale)],
        "capture_seconds": {"bounds": (0.1, 1.0), "counts": [scale, 0, 1], "sum": 0.5 * scale},
        "entries": [(("decode", "block"), scale)], "pool_bytes": 100 * scale, "warm_ratio": 0.5,
    }  # fmt: skip
    return EngineStats(
        num_running=scale, num_waiting=scale, kv_cache_usage=0.25, prefix_cache_queries=scale, prefix_cache_hits=scale,
        num_preemptions=scale, prompt_tokens=10 * scale, generation_tokens=20 * scale, steps=scale,
        ended={"length": scale, "stop": 1}, graphs=graphs, warm={"ratio": 0.5}, weight_version=f"v{scale}",
        idle_check_failures=scale, num_deferred=scale, drafts=scale, accepted_by_position={0: scale, 1: 1},
        histograms={"iteration_tokens": {"bounds": (1, 8), "counts": [scale, 1, 0], "sum": 3 * scale}},
    )  # fmt: skip


def test_counters_continue_across_restarts_and_gauges_do_not():
    lost = totals_after_exit(snapshot(1), "it crashed")
    assert (lost.num_running, lost.num_waiting, lost.kv_cache_usage, lost.warm) == (0, 0, 0.0, {})
    assert "entries" not in lost.graphs and "pool_bytes" not in lost.graphs
    assert (lost.generation_tokens, lost.last_error, lost.weight_version) == (20, "it crashed", "v1")
    both = add_totals(lost, snapshot(2))
    assert (both.num_running, both.kv_cache_usage, both.weight_version, both.warm) == (2, 0.25, "v2", {"ratio": 0.5})
    assert (both.prompt_tokens, both.generation_tokens, both.steps, both.idle_check_failures) == (30, 60, 3, 3)
    assert (both.prefix_cache_queries, both.prefix_cache_hits, both.num_preemptions) == (3, 3, 3)
    assert both.ended == {"length": 3, "stop": 2}
    assert (lost.num_deferred, both.num_deferred, both.drafts) == (0, 2, 3)
    assert both.accepted_by_position == {0: 3, 1: 2}
    assert both.histograms == {"iteration_tokens": {"bounds": (1, 8), "counts": [3, 2, 0], "sum": 9}}
    assert add_totals(EngineStats(), both).histograms == both.histograms
    assert both.graphs == {
        "replays": [(("decode", "block", "decode", 8), 15)], "real_tokens": [(("decode",), 90)],
        "capture_seconds": {"bounds": (0.1, 1.0), "counts": [3, 0, 2], "sum": 1.5},
        "entries": [(("decode", "block"), 2)], "pool_bytes": 200, "warm_ratio": 0.5,
    }  # fmt: skip
    # A third process keeps the totals of the first two.
    assert add_totals(totals_after_exit(both, ""), EngineStats()).generation_tokens == 60
    assert totals_after_exit(both, "").graphs["replays"] == both.graphs["replays"]


def test_every_field_of_a_snapshot_is_classified_as_counter_or_gauge(make_engine):
    """A new field of the stats must be listed here or in counters.py: it is either a counter or a gauge."""
    from dataclasses import fields

    from engine.client.counters import COUNTS, GRAPH_COUNTS

    gauges = {
        "num_running",
        "num_waiting",
        "num_deferred",
        "kv_cache_usage",
        "warm",
        "weight_version",
        "last_error",
        "pause",
        "released",
        "weights_discarded",
        "num_threads",
        "tier_bytes",
    }
    merged = {"ended", "graphs", "accepted_by_position", "histograms", "tier_hits"}
    assert {field.name for field in fields(EngineStats)} == gauges | merged | set(COUNTS)
    graphs = make_engine().stats().graphs
    assert set(graphs) == set(GRAPH_COUNTS) | {"capture_seconds", "entries", "pool_bytes", "warm_ratio"}
    assert isinstance(Snapshot(EngineStats()).stats, EngineStats)
