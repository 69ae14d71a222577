"""Engines on toy models with recurrent and latent layers: every way to compute gives the tokens of plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine
from engine.errors import ConfigError
from tests.engine.lively import drain, greedy, request, tokens
from tests.support.engines import DEVICES, engines
from tests.support.installed import install_entry_point
from tests.support.toy_models import ToyReference, write_toy

KINDS = {
    "hybrid": ("recurrent", "attention", "recurrent", "attention"),
    "latent": ("latent", "latent"),
    "latent hybrid": ("latent", "recurrent"),
    "recurrent": ("recurrent", "recurrent"),
}
PROMPTS = ([5, 9, 90, 31, 7], [17], list(range(3, 40)), [50, 8, 8, 8, 60, 44, 61, 2], [70, 1])
MANY = [[10 + i, 20 + i, 30 + i] for i in range(8)]
SMALL = {"num_pages": 20, "max_model_len": 128}

Make = Callable[..., Engine]


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make engines of a kind with settings; each is checked for leaks and closed after the test."""
    install_entry_point(monkeypatch, tmp_path / "site", "toy-mixer", "tests.support.toy_models:ENTRY")
    with engines(device=request.param) as make_engine:

        def make(kind: str, **settings: Any) -> Engine:
            folder = tmp_path / kind
            if not folder.exists():
                write_toy(folder, KINDS[kind])
            return make_engine(**({"model": str(folder)} | settings))

        yield make


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ToyReference]:
    folder, made = tmp_path_factory.mktemp("toys"), {}

    def get(kind: str) -> ToyReference:
        if kind not in made:
            made[kind] = ToyReference(write_toy(folder / kind, KINDS[kind]), KINDS[kind])
        return made[kind]

    return get


def tokens_of(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, count: int = 20) -> list[list[int]]:
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=greedy(count))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_scope_gives_the_tokens_of_plain_torch(make, reference, kind, scope):
    engine = make(kind, inference_cuda_graph_scope=scope)
    assert tokens_of(engine) == [reference(kind).greedy(prompt, 20) for prompt in PROMPTS]
    replays = dict(engine.stats().graphs["replays"])
    assert any(labels[2] == "decode" for labels in replays) == (scope != "none")
    assert not any(reason == "capture_failed" for (_, _, reason), _ in engine.stats().graphs["fallbacks"])


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_plain_torch(make, reference, kind):
    for batched in (8, 512):
        engine = make(kind, max_num_batched_tokens=batched)
        params = greedy(12, logprobs=0, prompt_logprobs=0)
        outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = [*prompt, *output.token_ids]
            expected = reference(kind).logits(ids).log_softmax(-1)
            scored = [*(output.prompt_logprobs or [None])[1:], *(output.logprobs or [])]
            found = torch.tensor([one.logprob for one in scored])
            torch.testing.assert_close(found, expected[range(len(ids) - 1), ids[1:]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_prefill_carries_the_state(make, reference, kind):
    engine = make(kind, max_num_batched_tokens=8)
    assert tokens_of(engine) == [reference(kind).greedy(prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kind", ["hybrid", "latent"])
def test_preempted_requests_start_from_a_fresh_state(make, reference, kind, async_scheduling):
    engine = make(kind, **SMALL, async_scheduling=async_scheduling)
    assert tokens_of(engine, MANY, 60) == [reference(kind).greedy(prompt, 60) for prompt in MANY]
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_slot_keeps_nothing_of_its_last_request(make, reference, kind, async_scheduling):
    """Two slots serve all requests in turn. A prompt of one token starts with a decode, others with a prefill."""
    engine = make(kind, max_num_seqs=2, graph_buckets=(2,), async_scheduling=async_scheduling)
    prompts = [*PROMPTS, [17], [70, 1]]
    assert tokens_of(engine, prompts) == [reference(kind).greedy(prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("scope", ["layer", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_change_no_token(make, reference, kind, scope):
    expected = [reference(kind).greedy(prompt, 20) for prompt in PROMPTS[:3]]
    for buckets in ((3, 8), (4, 8), (8,)):
        engine = make(kind, graph_buckets=buckets, inference_cuda_graph_scope=scope)
        assert tokens_of(engine, PROMPTS[:3]) == expected
        states = engine.loop.executor.worker.runner.model_state.tensors()
        assert bool(states) == any("recurrent" in mixer for mixer in KINDS[kind])
        assert not any(whole[:, 0].any() for whole in states.values())


def test_a_capture_between_steps_leaves_the_states_of_running_requests(make, reference):
    engine = make("hybrid", warmup="background", graph_buckets=(1, 2, 4, 8))
    for index, prompt in enumerate(PROMPTS):
        engine.loop.add(request(str(index), prompt, greedy(20)))
    found = {str(index): [] for index in range(len(PROMPTS))}
    while engine.loop.has_work:
        for event in engine.loop.step():
            found[event.request_id] += event.token_ids
        engine.loop.captures.capture_next()
    assert list(found.values()) == [reference("hybrid").greedy(prompt, 20) for prompt in PROMPTS]


def test_a_state_of_nan_ends_with_its_request(make, reference):
    engine = make("hybrid", max_num_seqs=1, graph_buckets=(1,), async_scheduling=False)
    loop = engine.loop
    loop.add(request("bad", PROMPTS[0], greedy(20)))
    loop.step()
    for whole in loop.executor.worker.runner.model_state.tensors().values():
        whole[:, 1] = float("nan")
    [*_, last] = drain(loop)["bad"]
    assert last.finish_reason == "error" and "finite" in last.error
    assert tokens_of(engine) == [reference("hybrid").greedy(prompt, 20) for prompt in PROMPTS]


def test_new_weights_recompute_running_states(make, reference, tmp_path):
    engine, prompt = make("hybrid"), PROMPTS[2]
    engine.loop.add(request("one", prompt, greedy(20)))
    found = [token for _ in range(5) for event in engine.loop.step() for token in event.token_ids]
    read = len(found)
    weights = write_toy(tmp_path / "other", KINDS["hybrid"], seed=1)
    engine.update_weights(list(weights.items()), version="other")
    changed = ToyReference(weights, KINDS["hybrid"])
    found += tokens(drain(engine.loop)["one"])
    # An engine that runs ahead has sampled one more token with the old weights before the update.
    switched = [n for n in (read, read + 1) if found[n:] == changed.greedy([*prompt, *found[:n]], 20 - n)]
    assert switched and found[: switched[0]] == reference("hybrid").greedy(prompt, switched[0])


def test_prefix_caching_is_off_with_recurrent_layers_and_on_with_latent_ones(make, caplog):
    with caplog.at_level(logging.INFO, logger="engine.worker.sizing"):
        assert make("hybrid").loop.prefix_cache is None
    assert "prefix caching is off: ToyMixerForCausalLM has layers with recurrent state" in caplog.text
    with pytest.raises(ConfigError, match="enable_prefix_caching=True doesn't work with ToyMixer.*2 of its layers"):
        make("hybrid", enable_prefix_caching=True)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="engine.worker.sizing"):
        make("hybrid", enable_prefix_caching=False)
    assert "prefix caching" not in caplog.text


def test_speculative_decoding_is_refused_with_recurrent_layers_and_works_with_latent_ones(make, reference):
    with pytest.raises(ConfigError, match="num_speculative_tokens=3 doesn't work with ToyMixer.*2 of its layers"):
        make("hybrid", num_speculative_tokens=3)
    engine = make("latent", num_speculative_tokens=3)
    assert tokens_of(engine, count=40) == [reference("latent").greedy(prompt, 40) for prompt in PROMPTS]


def test_a_cached_prefix_of_latents_gives_the_same_tokens(make, reference):
    engine = make("latent")
    shared = [5 + 7 * place % 90 for place in range(48)]
    for prompt in ([*shared, 9], [*shared, 20, 31]):
        assert tokens_of(engine, [prompt]) == [reference("latent").greedy(prompt, 20)]
    assert engine.stats().prefix_cache_hits > 0


def test_a_model_without_paged_layers_has_no_page_table(make, reference):
    engine = make("recurrent", max_model_len=512)
    assert engine.loop.executor.worker.runner.kv.groups == () and engine.loop.executor.worker.runner.kv.nbytes == 0
    assert engine.loop.config.num_pages == 2
    prompt = [3 + i % 90 for i in range(400)]
    assert tokens_of(engine, [prompt, *MANY], 30) == [reference("recurrent").greedy(p, 30) for p in (prompt, *MANY)]
