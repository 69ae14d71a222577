"""A short campaign of attacks on a tiny model. `python -m tests.soak.attacks` runs the long one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import RunningServer, running, tiny_config
from tests.server.http.test_request_sizes import MAX_TURN_SECONDS, LongestTurn
from tests.soak.attack_clients import ATTACKS, BODIES
from tests.soak.attacks import Campaign, Cell, free_port, runs
from tests.soak.watch import ask, processes_of, quantile, resident

FLAGS = ("--num-threads", "1", "--max-num-seqs", "8", "--max-model-len", "1024", "--write-seconds", "1",
         "--graph-buckets", "1,8", "--warmup", "full", "--graph-manifest", "none")  # fmt: skip


@pytest.fixture
def campaign(tiny_model: Path, tmp_path: Path) -> Campaign:
    return Campaign(str(tiny_model), 1.0, tmp_path, FLAGS)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[RunningServer]:
    with running(tiny_config(tiny_model, in_process=False, max_model_len=1024)) as handle:
        handle.answer("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
        yield handle


def faults(cell: Cell) -> list[str]:
    """Return the faults; without those of times if the machine has twice as much to do as it has processors."""
    cell.check()
    is_busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    times = ("/health p99", "a good", "restart", "processes were left", "not idle")
    return [fault for fault in cell.faults if not (is_busy and fault.startswith(times))]


def test_a_server_survives_every_attack_over_http(campaign: Campaign) -> None:
    cells = list(campaign.over_http(list(ATTACKS)))
    assert [cell.name for cell in cells] == list(ATTACKS)
    assert {cell.name: faults(cell) for cell in cells} == {name: [] for name in ATTACKS}
    assert all(cell.health is not None and cell.health < 5 for cell in cells)


@pytest.mark.parametrize("name", BODIES)
def test_no_body_holds_the_event_loop(server: RunningServer, name: str) -> None:
    """Measured in CPU time, which depends little on what else the machine runs; the shortest of three if it is long."""
    for path, content in BODIES[name]():
        turns: list[float] = []
        while len(turns) < 3 and not any(seconds < MAX_TURN_SECONDS for seconds in turns):
            with LongestTurn(server) as longest:
                refused = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
            turns.append(longest.seconds)
        assert refused.status_code < 500 and min(turns) < MAX_TURN_SECONDS, (path, content[:100])


def test_a_pipe_that_nobody_reads_stops_no_request(campaign: Campaign) -> None:
    assert faults(campaign.pipe()) == []


def test_a_killed_engine_is_replaced_in_time(campaign: Campaign) -> None:
    assert faults(campaign.engine_killed()) == []


def test_a_server_whose_engine_is_killed_at_its_first_start_ends_with_an_error(campaign: Campaign) -> None:
    assert faults(campaign.engine_killed_loading()) == []


def test_a_killed_api_worker_is_replaced_and_requests_go_on(campaign: Campaign) -> None:
    assert faults(campaign.worker_killed()) == []


def test_a_server_without_standard_error_serves_and_ends_with_0(campaign: Campaign) -> None:
    assert faults(campaign.closed_stderr()) == []


@pytest.mark.parametrize("phase", ["loading", "streaming"])
def test_no_process_is_left_when_the_main_process_is_killed(campaign: Campaign, phase: str) -> None:
    assert faults(campaign.main_killed(phase)) == []


def test_the_watch_measures_what_it_should() -> None:
    child = os.fork()
    if not child:
        held = bytearray(64 * 2**20)
        time.sleep(60)
        os._exit(len(held) % 2)
    try:
        end = time.monotonic() + 10
        while resident(child) < 64 * 2**20 and time.monotonic() < end:
            time.sleep(0.01)
        assert child in processes_of(os.getpid())
        assert resident(child) >= 64 * 2**20 and resident(os.getpid()) > resident(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not runs(child)
    assert ask(f"http://127.0.0.1:{free_port()}", "GET", "/health") is None
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0 and quantile([], 0.5) == float("inf")


def test_exceeded_limits_are_faults() -> None:
    cell = Cell("x", "", peak=2 * 2**30, health=0.3, good=2.5, after_kill=11.0)
    cell.check()
    assert len(cell.faults) == 4 and "held" not in cell.row()
    good = Cell("x", "", peak=2**20, health=0.1, good=1.0, idle=0.1)
    good.check()
    assert good.faults == [] and good.row().endswith("| held |")
