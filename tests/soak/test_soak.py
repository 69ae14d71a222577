"""Shortened runs of soak.py, and tests of the load generator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import RunningServer, running, tiny_config
from tests.soak import long
from tests.soak.load import Load
from tests.soak.serving import serving
from tests.soak.soak import run


def test_streams_and_disconnecting_clients_leak_nothing(tiny_model: Path, tmp_path: Path) -> None:
    runs = run(tiny_model, tmp_path / "server.log", scale=0.06)
    assert [one["faults"] for one in runs] == [[], []], (tmp_path / "server.log").read_text()[-3000:]
    together, leaving = runs
    assert together["finished"] == together["requests"] == 120 and together["streams_together"] > 15
    assert leaving["finished"] + leaving["aborted"] == 120 and leaving["aborted"] >= 30
    assert "Traceback" not in (tmp_path / "server.log").read_text()


@pytest.mark.slow
def test_a_long_soak_continues_after_its_last_part(tmp_path: Path) -> None:
    for part in (1, 2):
        assert long.main(["--state", str(tmp_path), "--minutes", "0.4"]) == 0
        samples = long.read_samples(tmp_path)
        assert [one["turn"] for one in samples] == list(range(len(samples)))
        assert len({one["server"] for one in samples}) == part
    assert {one["fault"] for one in samples} >= {"nothing", "slow_readers", "update_weights", "sleep_and_wake"}
    assert "None." in (tmp_path / "report.md").read_text() and (tmp_path / "report.png").stat().st_size > 10_000


def test_a_long_soak_finds_growth() -> None:
    base = {"turn": 0, "fault": "nothing", "faults": [], "server": 1, "engine": 2, "graphs": 5.0}

    def sample(turn: int, **changes: float) -> dict:
        same = {"memory": {"server": 100 << 20, "engine": 200 << 20}, "files": {"server": 20, "engine": 4}}
        grown = {"memory": {"server": 100 << 20, "engine": (200 << 20) + (turn << 20)}} if "memory" in changes else {}
        return base | same | grown | {"turn": turn} | ({"graphs": 5.0 + turn} if "graphs" in changes else {})

    turns = range(long.LEAST_TURNS)
    assert long.faults_of([sample(turn) for turn in turns]) == []
    assert "memory grew" in long.faults_of([sample(turn, memory=1) for turn in turns])[0]
    assert "graphs grew" in long.faults_of([sample(turn, graphs=1) for turn in turns])[0]


def test_server_and_client_state_is_empty_after_load(tiny_model: Path) -> None:
    with running(tiny_config(tiny_model, max_model_len=4096, max_num_seqs=16)) as server:
        load = Load(server.url, requests=60, streams=20, tokens=1000, aborts=58, abort_seconds=1.0)
        result = asyncio.run(load.run())
        assert result.aborted >= 55 and result.finished + result.aborted == 60
        server.wait_idle()
        client = server.service.client
        server.wait(lambda: client.num_pending == 0, "the last streams' ends")
        assert server.service.admission.in_flight == 0 and client.stats().kv_cache_usage == 0
        server.wait(lambda: sum(client.stats().ended.values()) == ended(server) >= 55, "each end to be counted once")


def test_prompts_of_many_lengths_do_not_grow_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    """In bf16 each length compiles kernels: 300 lengths took 600 MiB before their number was limited."""
    flags = ("--dtype", "bfloat16", "--num-threads", "1", "--warmup", "lazy", "--max-model-len", "512")
    with serving(tiny_model, tmp_path / "server.log", *flags) as server, httpx.Client(base_url=server.url) as http:

        def memory_after(lengths: range) -> int:
            for length in lengths:
                body = {"prompt": [length % 200 + 5] * length, "max_tokens": 1}
                http.post("/v1/completions", json=body, timeout=30).raise_for_status()
            return server.memory()["engine"]

        filled = memory_after(range(480, 430, -1))
        assert memory_after(range(430, 340, -1)) - filled < 60 * 2**20


def ended(server: RunningServer) -> int:
    """Sequences that the server counted as ended. A client may disconnect before its request is admitted."""
    return int(server.metric("encore_request_success_total"))


async def answering(body: bytes, wait: float = 0.0) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        await asyncio.sleep(wait)
        writer.write(body)
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


DONE = b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[]}\n\ndata: {"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (DONE, (3, 0, {}, 21)),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", (0, 0, {"503": 3}, 0)),
        (DONE.removesuffix(b"data: [DONE]\n\n"), (0, 0, {"EOFError": 3}, 0)),
        (b"", (0, 0, {"EOFError": 3}, 0)),
    ],
)
async def test_the_load_distinguishes_finished_refused_and_broken_requests(body: bytes, expected: tuple) -> None:
    server = await answering(body)
    async with server:
        port = server.sockets[0].getsockname()[1]
        result = await Load(f"http://127.0.0.1:{port}", requests=3, streams=2, tokens=7).run()
    assert (result.finished, result.aborted, result.refused, result.tokens) == expected


async def test_the_load_aborts_as_many_requests_as_configured() -> None:
    server = await answering(DONE, wait=0.5)
    async with server:
        port = server.sockets[0].getsockname()[1]
        load = Load(f"http://127.0.0.1:{port}", requests=8, streams=8, tokens=7, aborts=5, abort_seconds=0.2)
        result = await load.run()
    assert (result.finished, result.aborted, result.refused) == (3, 5, {})
