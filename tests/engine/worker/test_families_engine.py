"""An engine on every family: captured steps, cached prefixes, chunks, preemptions and drafts give transformers' tokens.

Contexts are several windows long, so that pages leave the windows while requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine import Engine
from engine.attention.cache_spec import group_layers
from engine.models import config_from_folder
from tests.engine.lively import MANY, PROMPTS, Reference, greedy
from tests.support.engines import engines, greedy_tokens
from tests.support.families import FAMILIES, WINDOW, load_reference, tiny_folder

PAGE = 4
COUNT = 24
LONG = [5 + 7 * place % 300 for place in range(6 * WINDOW)]
FEW = [7, 11, 40, 101, 250]  # tokens of a text that repeats pairs, for which the drafter has proposals


PARTS_OF_OTHERS = {  # nothing that others lack
    *("ministral", "gemma", "olmo", "stablelm", "seed_oss", "glm", "exaone4"),
    *("olmoe", "granitemoe", "granitemoeshared"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=[pytest.mark.slow] if family in PARTS_OF_OTHERS else []) for family in FAMILIES],
)
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(request.param, tmp_path_factory.mktemp(request.param), tiny_model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    reference = Reference(folder)
    reference.model = load_reference(folder)
    return reference


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines with settings; each is checked for leaks and closed after the test."""
    with engines(model=str(folder), device="cpu", page_size=PAGE) as make:
        yield make


def check(engine: Engine, reference: Reference, prompts: Sequence[Sequence[int]]) -> None:
    assert greedy_tokens(engine, prompts, COUNT) == [reference.greedy(prompt, COUNT) for prompt in prompts]
    assert not any(reason == "capture_failed" for (_, _, reason), _ in engine.stats().graphs["fallbacks"])


def test_captured_layers_and_cached_prefixes(make, reference):
    engine = make(inference_cuda_graph_scope="layer")
    check(engine, reference, [*PROMPTS, LONG])
    check(engine, reference, [[*LONG, 9, 200]])
    assert any(labels[2] == "decode" for labels in dict(engine.stats().graphs["replays"]))
    assert engine.stats().prefix_cache_hits > 0


def test_captured_steps_with_chunks_preemptions_and_drafts(make, reference, folder):
    windows = [group.window for group in group_layers(config_from_folder(folder).cache_specs())]
    engine = make(
        inference_cuda_graph_scope="block",
        max_model_len=128,
        max_num_batched_tokens=8,
        num_pages=1 + sum(36 if window is None else 20 for window in windows),
        num_speculative_tokens=2,
    )
    check(engine, reference, [LONG, PROMPTS[0]])
    check(engine, reference, MANY)
    text = [*FEW, *FEW]
    for _ in range(COUNT):
        text.append(FEW[int(reference.logits(text)[-1, FEW].argmax())])
    params = greedy(COUNT, logit_bias=dict.fromkeys(FEW, 100.0))
    [output] = engine.generate(prompt_token_ids=[[*FEW, *FEW]], sampling_params=params)
    assert [*FEW, *FEW, *output.token_ids] == text
    stats = engine.stats()
    assert any(labels[2] == "decode" for labels in dict(stats.graphs["replays"]))
    assert stats.num_preemptions > 0 and stats.draft_tokens > 0
