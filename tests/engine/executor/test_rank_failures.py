"""Failures of one rank: all ranks end with a clear error, weights are never mixed, and shared memory is freed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig
from engine.core.service import serve
from engine.distributed import process_group
from engine.errors import EngineDead, WeightUpdateError
from engine.executor import worker_group
from engine.executor.messages import Call, SharedTensor
from engine.executor.worker_group import WorkerGroup
from engine.loader.weights import iterate_safetensors
from engine.worker.async_output import AsyncStepOutput
from tests.engine.lively import PROMPTS, greedy, request
from tests.support.waiting import PATIENCE


@pytest.fixture
def engine(config: Callable[..., EngineConfig]) -> Iterator[Engine]:
    """An engine of two ranks, for one test to break."""
    with Engine(config(tensor_parallel_size=2)) as engine:
        yield engine


def generate(engine: Engine) -> list[list[int]]:
    outputs = engine.generate(prompt_token_ids=list(PROMPTS), sampling_params=greedy(20))
    return [list(output.token_ids) for output in outputs]


def change_calls(monkeypatch: pytest.MonkeyPatch, method: str, change: Callable[[Call], Call]) -> None:
    """Change what rank 1 receives of the calls of this method."""
    broadcast = WorkerGroup.broadcast

    def changed(group: WorkerGroup, message: Any) -> None:
        broadcast(group, change(message) if isinstance(message, Call) and message.method == method else message)

    monkeypatch.setattr(WorkerGroup, "broadcast", changed)


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_on_rank_0_ends_all_ranks(engine, monkeypatch):
    def fail(step):
        raise RuntimeError("the device coughed")

    monkeypatch.setattr(engine.loop.executor.worker.runner, "execute", fail)
    for _ in range(2):
        with pytest.raises(EngineDead, match="rank 0 failed in execute: RuntimeError: the device coughed"):
            generate(engine)


def test_a_result_that_fails_on_rank_0_ends_all_ranks(engine, monkeypatch):
    def fail(output):
        raise RuntimeError("the device fell over")

    monkeypatch.setattr(AsyncStepOutput, "_collect", fail)
    with pytest.raises(EngineDead, match="rank 0 failed in a step: RuntimeError: the device fell over"):
        generate(engine)


def test_a_step_that_fails_on_another_rank_ends_all_ranks(engine, monkeypatch):
    change_calls(monkeypatch, "execute", lambda call: call._replace(args=(None,)))
    with pytest.raises(EngineDead, match="AttributeError: 'NoneType'"):
        generate(engine)


@pytest.mark.parametrize(
    "change",
    [
        lambda call: call._replace(number=call.number + 1),
        lambda call: call._replace(state=call.state._replace(tokens=1)),
        lambda call: call._replace(state=call.state._replace(counters=(0, 1, 0, 0))),
    ],
    ids=["a lost call", "other tokens", "other captures"],
)
def test_ranks_in_different_states_end(engine, monkeypatch, change):
    change_calls(monkeypatch, "execute", change)
    with pytest.raises(EngineDead, match="the state of rank 1 is"):
        generate(engine)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_an_update_that_one_rank_refuses_is_written_on_none(engine, lively_model, other_model, reference, monkeypatch):
    def spoil(call):
        [[*weights, (name, tensor)]] = call.args
        return call._replace(args=([*weights, (name, SharedTensor.of(tensor.open()[:-1]))],))

    with monkeypatch.context() as patch:
        change_calls(patch, "stage_weights", spoil)
        with pytest.raises(WeightUpdateError, match="rank 1: weight update rejected"):
            engine.update_weights(iterate_safetensors(other_model), version="refused")
    expected = [reference.greedy(prompt, 20) for prompt in PROMPTS]
    assert generate(engine) == expected and engine.weight_version == "initial"
    engine.update_weights(iterate_safetensors(lively_model), version="same")
    assert generate(engine) == expected


def shared_memory(pid: int | str = "self") -> list[str]:
    """A process's open files and mappings of shared memory for messages."""
    files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in (*files, *mappings) if "encore-message" in line]


def test_no_shared_memory_is_left_on_any_rank_after_an_update(engine, other_model, other_reference):
    engine.update_weights(iterate_safetensors(other_model), version="new")
    assert shared_memory() == []
    assert generate(engine) == [other_reference.greedy(prompt, 20) for prompt in PROMPTS]
    assert shared_memory(engine.loop.executor.pids[0]) == []


@pytest.mark.parametrize("method", ["stage_weights", "commit_weights"])
def test_a_rank_that_dies_in_an_update_ends_the_group_and_leaves_no_shared_memory(
    engine, other_model, monkeypatch, method
):
    def kill(call):
        os.kill(engine.loop.executor.pids[0], signal.SIGKILL)
        return call

    change_calls(monkeypatch, method, kill)
    with pytest.raises(EngineDead, match="rank 1 ended with exit code -9"):
        engine.update_weights(iterate_safetensors(other_model), version="lost")
    assert shared_memory() == []
    with pytest.raises(EngineDead, match="rank 1 ended with exit code -9"):
        generate(engine)


# ---- lost ranks ------------------------------------------------------------------------------------------------------


def test_a_rank_that_hangs_in_a_step_is_killed(config, monkeypatch):
    with Engine(config(tensor_parallel_size=2)) as engine:
        generate(engine)
        monkeypatch.setattr(worker_group, "SILENCE_SECONDS", 3.0)  # only now: a busy machine makes ranks silent too
        os.kill(engine.loop.executor.pids[0], signal.SIGSTOP)
        with pytest.raises(EngineDead, match="rank 1 has not answered for 3 s"):
            generate(engine)


def test_a_collective_that_another_rank_does_not_reach_ends_the_group(config, monkeypatch):
    """The other rank still sends heartbeats, as one that hangs in a call without the GIL does."""
    monkeypatch.setattr(process_group, "COLLECTIVE_SECONDS", 5.0)
    broadcast = WorkerGroup.broadcast

    def lose_step(group: WorkerGroup, message: Any) -> None:
        if not (isinstance(message, Call) and message.method == "execute"):
            broadcast(group, message)

    with Engine(config(tensor_parallel_size=2)) as engine:
        generate(engine)
        [pid] = engine.loop.executor.pids
        monkeypatch.setattr(WorkerGroup, "broadcast", lose_step)
        for _ in range(2):
            with pytest.raises(
                EngineDead, match="rank 0 failed in execute: a collective waited too long for another rank"
            ):
                generate(engine)
    assert not Path(f"/proc/{pid}").exists()


def test_an_idle_engine_notices_a_lost_rank(engine):
    reports, ends = [], time.monotonic() + PATIENCE

    def receive(timeout):
        assert time.monotonic() < ends
        time.sleep(timeout)

    os.kill(engine.loop.executor.pids[0], signal.SIGKILL)
    serve(engine.loop, receive, reports.append)
    assert "rank 1 ended with exit code -9" in reports[-1].reason


def test_requests_of_a_lost_engine_end_without_an_event(engine):
    """Their clients get the Dead report's reason; an abort event would look like the end of a request."""
    reports, pids = [], list(engine.loop.executor.pids)
    engine.loop.add(request("a", PROMPTS[0], greedy(200)))

    def receive(timeout):
        if len(reports) >= 5 and pids:  # a slow step sends two
            os.kill(pids.pop(), signal.SIGKILL)

    serve(engine.loop, receive, reports.append)
    events = [event for report in reports for event in getattr(report, "events", ())]
    assert events and not any(event.finish_reason for event in events)
    assert "rank 1 ended with exit code -9" in reports[-1].reason
