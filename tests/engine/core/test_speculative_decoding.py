"""Speculative decoding by prompt lookup: the texts are those without drafts, in fewer steps."""

from __future__ import annotations

import pytest

from engine import SamplingParams
from engine.errors import ConfigError
from engine.protocol.request import EngineRequest
from graph_cache.core.host_ring import HostRing

REPEATING = [[5, 6, 7, 8, 9] * 6, [11, 12, 13] * 9 + [11], list(range(20, 40)) * 2, [3, 4]]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=60, ignore_eos=True, seed=3),
    "stop tokens": SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=tuple(range(0, 200, 9))),
    "biased": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={17: 4.0, 18: 4.0}),
    "penalties": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=1.2),
    "min_tokens": SamplingParams(temperature=0.0, max_tokens=40, min_tokens=12, stop_token_ids=tuple(range(0, 200, 5))),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2),
}
WITHOUT_DRAFTS = {"penalties", "min_tokens", "logprobs"}


def texts(engine, params):
    outputs = engine.generate(prompt_token_ids=REPEATING, sampling_params=params)
    return [(output.token_ids, output.finish_reason, output.stop_reason) for output in outputs]


@pytest.mark.parametrize(
    "options", [{}, {"num_pages": 20}, {"enable_prefix_caching": False, "max_num_batched_tokens": 16}]
)
@pytest.mark.parametrize("kind", PARAMS)
def test_texts_equal_those_without_drafts(make_engine, kind, options):
    with make_engine(**options) as plain, make_engine(num_speculative_tokens=4, **options) as speculative:
        assert texts(speculative, PARAMS[kind]) == texts(plain, PARAMS[kind])
        stats = speculative.stats()
        assert plain.stats().draft_tokens == 0
        assert stats.draft_tokens == 0 or kind not in WITHOUT_DRAFTS
        assert stats.draft_tokens > 0 or kind not in ("greedy", "biased")
        assert stats.generation_tokens == plain.stats().generation_tokens
        speculative.loop.idle_check()


def test_accepted_drafts_save_steps(make_engine):
    always = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={17: 90.0})
    with make_engine(num_speculative_tokens=4) as engine:
        [output] = engine.generate(prompt_token_ids=[[3, 4]], sampling_params=always)
        stats = engine.stats()
        assert output.token_ids == [17] * 40
        assert stats.accepted_tokens == stats.draft_tokens > 25 and stats.steps < 20


def test_an_interruption_of_a_step_with_drafts_loses_no_token(make_engine, monkeypatch):
    always = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={17: 90.0})
    loop = make_engine(num_speculative_tokens=4).loop
    loop.add(EngineRequest(request_id="a", prompt_token_ids=[3, 4], params=always))
    events = [event for _ in range(6) for event in loop.step()]
    assert loop.finisher.draft_tokens

    def interrupted(ring, ticket):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HostRing, "read", interrupted)
        loop.step()
    while loop.has_work:
        events += loop.step()
    assert [token for event in events for token in event.token_ids] == [17] * 40


def test_a_request_can_be_aborted_between_steps_with_drafts(make_engine):
    always = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={17: 90.0})
    with make_engine(num_speculative_tokens=4) as engine:
        loop = engine.loop
        for name in ("a", "b"):
            loop.add(EngineRequest(request_id=name, prompt_token_ids=[3, 4], params=always))
        events = [event for _ in range(6) for event in loop.step()]
        loop.abort(["a"])
        while loop.has_work:
            events += loop.step()
        tokens = {name: [t for event in events if event.request_id == name for t in event.token_ids] for name in "ab"}
        assert tokens["b"] == [17] * 40 and 0 < len(tokens["a"]) < 40
        loop.idle_check()


def test_async_scheduling_is_off_by_default_and_refused(make_engine):
    with make_engine(num_speculative_tokens=2) as engine:
        assert engine.loop.config.async_scheduling is False
    with pytest.raises(ConfigError, match="num_speculative_tokens=2 can't be combined with async_scheduling=True"):
        make_engine(num_speculative_tokens=2, async_scheduling=True)
    with pytest.raises(ConfigError, match="num_speculative_tokens=-1 must be a whole number from 0 to 16"):
        make_engine(num_speculative_tokens=-1)
