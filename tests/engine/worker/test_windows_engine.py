"""Sliding windows in an engine: pages behind them are freed while requests run, and aborted requests leak none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import Engine
from tests.engine.lively import Reference, drain, greedy, request
from tests.support.engines import engines, greedy_tokens
from tests.support.families import WINDOW, load_reference, tiny_folder

PAGE = 4
PROMPT = [5 + 7 * place % 300 for place in range(5 * WINDOW)]


@pytest.fixture(params=["mistral", "gemma2", "smollm3-windows"])
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    return tiny_folder(request.param, tmp_path / "model", tiny_model)


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Engine]]:
    with engines(model=str(folder), device="cpu", page_size=PAGE, max_num_batched_tokens=8) as make:
        yield make


@pytest.mark.parametrize("folder", ["mistral"], indirect=True)
def test_a_context_of_many_windows_needs_the_pages_of_one(make, folder):
    engine = make(num_pages=1 + 8)  # of 160 tokens, 40 pages without a window
    reference = Reference(folder)
    reference.model = load_reference(folder)
    assert greedy_tokens(engine, [PROMPT], 100) == [reference.greedy(PROMPT, 100)]
    assert engine.stats().num_preemptions == 0 and engine.stats().kv_cache_usage == 0


def test_aborted_requests_return_their_pages(make):
    engine, chance = make(num_pages=1 + 90, max_num_seqs=6, graph_buckets=(6,)), random.Random(3)
    names = [str(index) for index in range(24)]
    for name in names:
        prompt = [chance.randrange(3, 300) for _ in range(chance.randrange(1, 5 * WINDOW))]
        engine.loop.add(request(name, prompt, greedy(chance.randrange(1, 60))))
    aborts: dict[int, list[str]] = {}
    for name in chance.sample(names, 16):
        aborts.setdefault(chance.randrange(120), []).append(name)
    drain(engine.loop, aborts)
    engine.idle_check()  # counts pages
    assert engine.stats().kv_cache_usage == 0
