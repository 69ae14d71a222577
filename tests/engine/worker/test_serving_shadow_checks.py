"""Shadow checks of an engine's steps: they change no token, and find graphs that write to a wrong page."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine import SamplingParams
from graph_cache.core.cache import CacheEntry
from tests.engine.lively import PROMPTS, greedy

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
    ),
]
MIXED = [
    greedy(24),
    SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, frequency_penalty=0.5, seed=2, ignore_eos=True, logprobs=2),
    greedy(24, logprobs=1),
    SamplingParams(max_tokens=24, temperature=1.0, top_k=5, seed=3, ignore_eos=True),
]


def outcomes(engine) -> Counter:
    return Counter(dict(engine.stats().graphs["shadow_checks"]))


def generate(engine, params=MIXED) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompt_token_ids=list(PROMPTS), sampling_params=params)]


def check_everything(engine) -> None:
    """Compare every replay with eager, not only the first of each graph and a sample."""
    cache = engine.loop.executor.graphs
    cache.shadows.due_sites = lambda: frozenset(cache.sites)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scope", ["block", "layer"])
def test_checks_of_every_step_change_no_token_and_find_nothing(make_engine, device, scope):
    settings = {"device": device, "inference_cuda_graph_scope": scope, "warmup": "full"}
    plain = make_engine(**settings)
    plain.loop.executor.graphs.shadows.share = 0.0
    expected = generate(plain)
    checked = make_engine(**settings)
    check_everything(checked)
    assert generate(checked) == expected
    found = outcomes(checked)
    assert not outcomes(plain) and {labels[2] for labels in found} == {"equal"}, found
    replays = Counter(dict(checked.stats().graphs["replays"]))
    parts = {"decode": 4 if scope == "layer" else 1}
    for site, (phase, count) in {labels[0]: (labels[1], n) for labels, n in found.items()}.items():
        ran = sum(n for labels, n in replays.items() if labels[0] == site) / parts.get(site, 1)
        assert ran - count <= 1, (site, phase)  # the flag of the last check is not read yet
    assert {"decode", "sampling"} <= {labels[0] for labels in found}


@pytest.mark.parametrize("device", DEVICES)
def test_a_page_off_by_one_is_found_and_requests_get_the_right_tokens(make_engine, reference, device, monkeypatch):
    engine = make_engine(device=device, warmup="full")
    runner = engine.loop.executor.worker.runner
    tables, replay = runner.state.page_tables, CacheEntry.replay

    def off_by_one(entry: CacheEntry) -> None:
        shift = (tables > 0).to(tables.dtype) if entry.key.site == "decode" else torch.zeros_like(tables)
        tables.add_(shift)
        replay(entry)
        tables.sub_(shift)

    monkeypatch.setattr(CacheEntry, "replay", off_by_one)
    [output] = engine.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(24))
    assert output.token_ids == reference.greedy(PROMPTS[0], 24)  # what it wrote to the wrong page, eager wrote over
    assert {labels: count for labels, count in outcomes(engine).items() if labels[0] == "decode"} == {
        ("decode", "decode", "differs"): 1
    }
    assert dict(engine.stats().graphs["shadow_mismatches"]) == {("decode", "decode"): 1}
    [row] = [row for row in engine.graphs() if row["site"] == "decode"]
    assert row["state"] == "failed" and "keys of layer 0" in row["failure"]
