"""KV events as Dynamo reads them: its indexer finds the blocks that the engine finds.

Needs `pip install --no-deps ai-dynamo-runtime` (1.6.1).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.engine.lively import drain, greedy, request
from tests.support.ports import free_port

pytest.importorskip("dynamo._core")
pytest.importorskip("zmq")
pytest.importorskip("msgspec")

pytestmark = pytest.mark.slow
SIZE = 16
RUN = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"


def wait(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Indexer:
    def __init__(self, port):
        self._url = f"http://127.0.0.1:{port}"

    def is_up(self):
        try:
            self.tokens([1] * SIZE)
        except OSError:
            return False
        return True

    def tokens(self, prompt, salt=""):
        """Return how many leading tokens of a prompt worker 7 has cached."""
        body = {"token_ids": prompt, "model_name": "default"} | ({"cache_salt": salt} if salt else {})
        head = {"content-type": "application/json"}
        call = urllib.request.Request(f"{self._url}/query", json.dumps(body).encode(), head)
        with urllib.request.urlopen(call, timeout=5) as answer:
            return json.load(answer)["scores"].get("7", {}).get("0", 0)


@pytest.fixture
def indexer():
    """Start Dynamo's indexer for one worker. Yields it with the address that the worker publishes on."""
    port, events = free_port(), free_port()
    words = ["--block-size", str(SIZE), "--port", str(port), "--workers", f"7=tcp://127.0.0.1:{events}"]
    process = subprocess.Popen([sys.executable, "-c", RUN, *words], env=os.environ | {"DYN_LOG": "error"})
    try:
        yield Indexer(port), f"tcp://*:{events}"
    finally:
        process.kill()
        process.wait()


def test_dynamo_finds_the_blocks_that_the_engine_finds(make_engine, indexer):
    found, endpoint = indexer
    loop = make_engine(
        kv_events_config={"enable_kv_cache_events": True, "endpoint": endpoint}, page_size=SIZE, num_pages=8,
        max_num_seqs=4, graph_buckets=(4,), max_model_len=96,
    ).loop  # fmt: skip
    wait(found.is_up)
    time.sleep(2)  # until it has connected
    prompts = [list(range(3, 60)), list(range(100, 150)), list(range(200, 260))]

    def agrees():
        cache = loop.prefix_cache
        for prompt in prompts:
            for salt in ("", "tenant"):
                version = repr((loop.weight_version, "", salt)) if salt else loop.weight_version
                pages = len(cache.lookup(cache.chain(version), [*prompt, 1])[0])
                if found.tokens(prompt, salt) != pages * SIZE:
                    return False
        return True

    assert agrees()
    for turn, (prompt, salt) in enumerate([(0, ""), (1, ""), (2, ""), (0, "tenant"), (1, ""), (0, ""), (0, "tenant")]):
        loop.add(request(f"{turn}", prompts[prompt], greedy(2, cache_salt=salt)))
        drain(loop)
        wait(lambda: found.tokens(prompts[prompt], salt) == 3 * SIZE, 10)  # noqa: B023  # called in this turn only
        wait(agrees, 10)
        if turn == 4:
            loop.reset_prefix_cache()
            wait(agrees, 10)
    assert loop.prefix_cache.evictions > 5
