"""An engine on a Gemma 3 model: every scope, chunking, preemption and cached prefix gives transformers' tokens.

Contexts are several windows long, so that pages leave the window while requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine
from tests.engine.lively import MANY, PROMPTS, Reference
from tests.support.engines import DEVICES, engines, greedy_tokens
from tests.support.gemma3 import WINDOW, write_lively_gemma3

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")  # from Triton: Python's ast, numpy scalars
PAGE = 4
COUNT = 40
LONG = [5 + 7 * place % 300 for place in range(8 * WINDOW)]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lively-gemma3")
    write_lively_gemma3(tiny_model, folder)
    return folder


@pytest.fixture(scope="module")
def gemma_reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines with settings; each is checked for leaks and closed after the test."""
    with engines(model=str(folder), device=request.param, page_size=PAGE) as make:
        yield make


def tokens_of(engine: Engine, prompts: Any, count: int = COUNT) -> list[list[int]]:
    return greedy_tokens(engine, prompts, count)


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
def test_every_scope_gives_the_tokens_of_transformers(make, gemma_reference, scope):
    engine = make(inference_cuda_graph_scope=scope)
    prompts = [*PROMPTS, LONG]
    assert tokens_of(engine, prompts) == [gemma_reference.greedy(prompt, COUNT) for prompt in prompts]
    replays = dict(engine.stats().graphs["replays"])
    assert any(labels[2] == "decode" for labels in replays) == (scope != "none")
    assert not any(reason == "capture_failed" for (_, _, reason), _ in engine.stats().graphs["fallbacks"])


@pytest.mark.parametrize("budget", [8, 29])
def test_chunked_prefill_gives_the_same_tokens(make, gemma_reference, budget):
    engine = make(max_num_batched_tokens=budget)
    assert tokens_of(engine, [LONG, PROMPTS[2]]) == [gemma_reference.greedy(p, COUNT) for p in (LONG, PROMPTS[2])]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_give_the_same_tokens(make, gemma_reference, prefix_caching):
    engine = make(num_pages=110, max_model_len=96, max_num_batched_tokens=8, enable_prefix_caching=prefix_caching)
    assert tokens_of(engine, MANY, 60) == [gemma_reference.greedy(prompt, 60) for prompt in MANY]
    assert engine.stats().num_preemptions > 0


def test_a_cached_prefix_gives_the_same_tokens(make, gemma_reference):
    engine = make()
    for prompt in ([*LONG, 9], [*LONG, 200, 31], [*LONG[:50], 4]):
        assert tokens_of(engine, [prompt]) == [gemma_reference.greedy(prompt, COUNT)]
    assert engine.stats().prefix_cache_hits > 0


def test_a_conversation_continues_from_its_own_cached_answer(make, gemma_reference):
    engine = make()
    [answer] = tokens_of(engine, [PROMPTS[0]])
    longer = [*PROMPTS[0], *answer, 7, 7]
    assert tokens_of(engine, [longer]) == [gemma_reference.greedy(longer, COUNT)]
    assert engine.stats().prefix_cache_hits > 0


def test_int4_and_dummy_weights_serve(make, request):
    if "cuda" in request.node.callspec.id:
        pytest.skip("int4 is a CPU format")
    engine = make(load_format="dummy", dtype="auto", cpu_weight_format="int4")
    assert [len(tokens) for tokens in tokens_of(engine, PROMPTS)] == [COUNT] * len(PROMPTS)
