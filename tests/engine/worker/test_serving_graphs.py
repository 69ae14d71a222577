"""Graphs in serving: every scope and warm-up mode gives the same tokens, and the counters match what happened."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from engine.protocol.request import EngineRequest
from graph_cache.errors import CaptureError
from tests.engine.lively import MANY, PROMPTS, SAMPLING_VARIANTS, greedy

LADDER = (1, 2, 4, 8)
LAYERS = 2


def counters(engine, name) -> Counter:
    return Counter(dict(engine.stats().graphs[name]))


def decode_graphs(engine) -> list[dict]:
    return [row for row in engine.graphs() if row["site"] == "decode"]


def tokens_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def staggered(engine, count=20) -> list[list[int]]:
    """Generate for five requests of different lengths: the batch shrinks from 5 to 1 as they end."""
    lengths = [count - 4 * i for i in range(len(PROMPTS))]
    return tokens_of(engine.generate(prompt_token_ids=PROMPTS, sampling_params=[greedy(n) for n in lengths]))


def expected_staggered(reference, count=20) -> list[list[int]]:
    return [reference.greedy(prompt, count - 4 * i) for i, prompt in enumerate(PROMPTS)]


# ---- scopes --------------------------------------------------------------------------------------------------------


def test_every_scope_gives_the_same_tokens_and_the_same_bits(make_engine, reference):
    found = {}
    for scope in ("none", "layer", "block"):
        engine = make_engine(inference_cuda_graph_scope=scope)
        outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(24, logprobs=2))
        found[scope] = [(output.token_ids, [dataclasses.astuple(one) for one in output.logprobs]) for output in outputs]
        assert tokens_of(outputs) == [reference.greedy(prompt, 24) for prompt in PROMPTS]
    assert found["none"] == found["layer"] == found["block"]  # logprobs as floats, equal to the last bit


def test_graphs_that_are_off_capture_nothing_and_say_why_steps_run_eager(make_engine, reference):
    for settings in ({"inference_cuda_graph_scope": "none"}, {"cuda_graph_impl": "none"}):
        engine = make_engine(**settings, warmup="full")
        assert staggered(engine) == expected_staggered(reference)
        assert not counters(engine, "captures") and not counters(engine, "replays")
        assert set(counters(engine, "fallbacks")) == {
            ("decode", "decode", "graphs_off"),
            ("prefill", "prefill", "phase_not_captured"),
        }


def test_a_layer_scoped_step_replays_a_graph_per_layer_and_two_more(make_engine):
    engine = make_engine(inference_cuda_graph_scope="layer")
    engine.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(11))
    assert counters(engine, "replays") == {("decode", "layer", "decode", 8): 10 * (LAYERS + 2)}
    [row] = decode_graphs(engine)
    assert (row["scope"], row["graphs"], row["replays"]) == ("layer", LAYERS + 2, 10)


# ---- warm-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", ["lazy", "full", "background"])
@pytest.mark.parametrize("scope", ["layer", "block"])
def test_every_warm_up_serves_the_right_tokens(make_engine, reference, warmup, scope):
    engine = make_engine(warmup=warmup, inference_cuda_graph_scope=scope, graph_buckets=LADDER)
    for _ in range(2):
        assert staggered(engine) == expected_staggered(reference)


def test_full_captures_everything_before_the_first_request_and_nothing_after(make_engine):
    engine = make_engine(warmup="full", graph_buckets=LADDER)
    sampling = 4 * SAMPLING_VARIANTS
    assert engine.stats().warm == {"mode": "full", "captured": 4 + sampling, "pending": 0, "ratio": 1.0}
    expected = {("decode", "block", "warmup"): 4, ("sampling", "block", "warmup"): sampling}
    assert counters(engine, "captures") == expected
    staggered(engine)
    assert counters(engine, "captures") == expected
    assert not [labels for labels in counters(engine, "fallbacks") if labels[0] == "decode"]


def test_lazy_captures_what_traffic_needs_the_largest_first(make_engine):
    engine = make_engine(graph_buckets=LADDER)
    engine.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(6))
    states = {row["bucket"]: row["state"] for row in engine.graphs() if row["state"] == "captured"}
    assert states == {8: "captured", 1: "captured"}
    assert counters(engine, "captures") == {("decode", "block", "miss"): 2}
    assert counters(engine, "replays") == {("decode", "block", "decode", 1): 5}  # the step that captures also replays


def test_background_answers_while_captures_are_pending_and_ends_with_none(make_engine, reference):
    engine = make_engine(warmup="background", graph_buckets=LADDER, max_model_len=1024)
    loop = engine.loop
    wanted = loop.stats().warm["pending"]
    decode, sampling = 4 * 3, 4 * SAMPLING_VARIANTS  # contexts of 256, 512 and 1024
    assert wanted == decode + sampling
    loop.add(EngineRequest(request_id="a", prompt_token_ids=list(PROMPTS[0]), params=greedy(200)))
    tokens, pending, captured = [], [], []
    while loop.has_work:
        tokens += [token for event in loop.step() for token in event.token_ids]
        captured.append(loop.capture_between_steps())
        pending.append(loop.stats().warm["pending"])
    assert tokens == reference.greedy(PROMPTS[0], 200)
    assert pending[0] >= wanted - 1 and pending == sorted(pending, reverse=True)
    assert not all(captured)  # captures take a small share of the time while serving
    eager = counters(engine, "fallbacks")["decode", "decode", "not_captured"]
    assert eager == 199 - counters(engine, "replays").total()
    while loop.capture_between_steps():
        pass
    assert loop.stats().warm == {"mode": "background", "captured": wanted, "pending": 0, "ratio": 1.0}
    assert staggered(engine) == expected_staggered(reference)
    assert counters(engine, "fallbacks")["decode", "decode", "not_captured"] == eager
    assert counters(engine, "captures") == {
        ("decode", "block", "background"): decode,
        ("sampling", "block", "background"): sampling,
    }


def test_crossing_a_context_bucket_does_not_change_the_tokens(make_engine, reference):
    prompt = [7 + i % 300 for i in range(248)]
    engine = make_engine(max_model_len=600)
    output = engine.generate(prompt_token_ids=[prompt, [5]], sampling_params=[greedy(16), greedy(16)])
    assert tokens_of(output) == [reference.greedy(prompt, 16), reference.greedy([5], 16)]
    # The single prompt token of [5] is a decode in the same step as the long prompt's prefill; then both decode.
    assert {row["statics"]["context"]: row["replays"] for row in decode_graphs(engine) if row["replays"]} == {
        256: 9,
        512: 7,
    }


def test_a_restart_warms_what_earlier_traffic_used(make_engine, tmp_path):
    settings = {"graph_manifest": str(tmp_path / "manifest.json"), "max_model_len": 4096, "graph_buckets": (2, 8)}
    first = make_engine(**settings)
    first.generate(prompt_token_ids=[9] * 1030, sampling_params=greedy(4))
    first.close()
    second = make_engine(**settings, warmup="full")
    rows = [row for row in decode_graphs(second) if row["state"] == "captured"]
    captured = {(row["bucket"], row["statics"]["context"]) for row in rows}
    ahead = {(bucket, context) for bucket in (2, 8) for context in (256, 512, 1024)}
    assert captured - ahead == {(2, 2048)}
    assert ahead <= captured


# ---- counters ------------------------------------------------------------------------------------------------------


def test_dummy_runs_of_warm_up_and_capture_are_not_counted(make_engine):
    engine = make_engine(warmup="full", graph_buckets=LADDER)
    engine.warm()
    stats = engine.stats()
    for name in ("replays", "fallbacks", "real_tokens", "padded_tokens", "batch_rows"):
        assert stats.graphs[name] == [], name
    assert stats.steps == stats.generation_tokens == stats.prompt_tokens == 0
    assert [row["replays"] for row in decode_graphs(engine)] == [0] * 4


@pytest.mark.parametrize("warmup", ["lazy", "full"])
def test_replays_counted_are_replays_that_happened(make_engine, monkeypatch, warmup):
    from graph_cache.core.runner import GraphRunner

    happened = Counter()
    replay = GraphRunner.replay

    def counted(runner):
        happened[runner] += 1
        return replay(runner)

    monkeypatch.setattr(GraphRunner, "replay", counted)
    engine = make_engine(warmup=warmup, graph_buckets=LADDER)
    staggered(engine)
    staggered(engine)
    assert counters(engine, "replays").total() == happened.total() == 40  # 20 steps each; the first also decodes
    assert sum(row["replays"] for row in engine.graphs()) == 40


def test_tokens_and_padding_are_counted_by_phase(make_engine):
    engine = make_engine(graph_buckets=LADDER)
    staggered(engine)
    lengths = [20, 16, 12, 8, 4]
    decoded = sum(lengths) - (len(PROMPTS) - 1)  # prefills give the first tokens, except for the one-token prompt
    prompt = sum(map(len, PROMPTS)) - 1
    assert counters(engine, "real_tokens") == {("decode",): decoded, ("prefill",): prompt}
    rows = Counter({labels[2]: count for labels, count in counters(engine, "batch_rows").items()})
    assert sum(row * count for row, count in rows.items()) == decoded
    bucket_of = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8}
    padding = sum((bucket_of[row] - row) * count for row, count in rows.items())
    assert counters(engine, "padded_tokens") == {("decode",): padding}
    assert sum(row["padded_rows"] for row in engine.graphs()) == padding
    stats = engine.stats()
    assert stats.generation_tokens == sum(lengths) and stats.prompt_tokens == prompt + 1
    assert stats.ended == {"length": 5}


def test_prefills_are_counted_as_eager_with_their_reason(make_engine):
    engine = make_engine(max_num_batched_tokens=8)
    engine.generate(prompt_token_ids=list(range(3, 23)), sampling_params=greedy(3))
    assert counters(engine, "fallbacks") == {("prefill", "prefill", "phase_not_captured"): 3}  # 8 + 8 + 4 tokens
    assert counters(engine, "replays") == {("decode", "block", "decode", 8): 2}


# ---- failures and memory -------------------------------------------------------------------------------------------


def test_a_capture_that_fails_is_counted_and_the_step_runs_eager(make_engine, reference, monkeypatch, caplog):
    engine = make_engine()
    backend = engine.loop.executor.worker.runner.cache.pool.backend

    def refuse(*_):
        raise CaptureError("refused by the test")

    monkeypatch.setattr(type(backend), "capture", refuse)
    assert staggered(engine) == expected_staggered(reference)
    assert counters(engine, "failed_captures") == {("decode", "block"): 1}  # tried once, not at every step
    assert counters(engine, "fallbacks")[("decode", "decode", "capture_failed")] == 20
    [row] = decode_graphs(engine)
    assert row["state"] == "failed" and "refused by the test" in row["failure"]
    assert "refused by the test" in caplog.text


def test_dropped_graphs_give_their_memory_back_and_are_captured_again(make_engine, reference):
    engine = make_engine(warmup="full", graph_buckets=LADDER)
    before = engine.stats().graphs["pool_bytes"]
    assert before > 0
    for _ in range(3):
        engine.loop.executor.worker.runner.cache.clear()
        assert engine.stats().graphs["pool_bytes"] == 0
        engine.warm()
        assert engine.stats().graphs["pool_bytes"] == before
        assert staggered(engine) == expected_staggered(reference)
    captures = {labels: count for labels, count in counters(engine, "captures").items() if labels[0] == "decode"}
    assert captures == {("decode", "block", "warmup"): 4, ("decode", "block", "evicted"): 12}


def test_warming_between_requests_leaves_no_old_rows_in_the_padding(make_engine, reference):
    """A capture overwrites and restores the static inputs; rows of an earlier larger batch must become padding."""
    engine = make_engine(enable_prefix_caching=False, num_pages=20)
    engine.generate(prompt_token_ids=MANY, sampling_params=greedy(20))
    engine.warm()
    prompt = list(range(5, 105))
    output = engine.generate(prompt_token_ids=prompt, sampling_params=greedy(60))[0]
    assert output.token_ids == reference.greedy(prompt, 60)
