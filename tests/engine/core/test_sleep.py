"""Sleep and wake: what is released, which graphs and tokens follow, and what happens to requests and updates."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from engine import Engine, EngineConfig
from engine.errors import ConfigError, EngineError, EnginePaused, RequestError, WeightUpdateError
from engine.protocol.outputs import CompletionOutput, OutputDelta
from engine.protocol.sleep import parts_of_level
from graph_cache.errors import GraphError
from tests.engine.lively import PROMPTS, SETTINGS, drain, greedy, request, tokens
from tests.support.engines import DEVICES, greedy_tokens
from tests.support.waiting import PATIENCE

PARTS = ("weights", "cuda_graph", "kv_cache")
ON = {"enable_sleep_mode": True}
COUNT = 20


@pytest.fixture
def sleeper(make_engine):
    return make_engine(**ON)


@pytest.fixture(params=DEVICES)
def on_device(request, make_engine):
    """Make an engine on a device; on a GPU, prefill is captured too."""
    return lambda **settings: make_engine(**(ON | {"device": request.param, "num_pages": 256} | settings))


def generated(engine):
    return greedy_tokens(engine, list(PROMPTS), COUNT)


def expected(reference):
    return [reference.greedy(prompt, COUNT) for prompt in PROMPTS]


def graphs_of(engine):
    """Return the digests of the graphs, and how many captures there were."""
    rows = {(row["site"], row["bucket"], str(row["statics"])): row["digest"] for row in engine.graphs()}
    return rows, engine.loop.executor.graphs.stats.captures.total()


def steps(loop, count):
    return [event for _ in range(count) for event in loop.step()]


# ---- memory and graphs ---------------------------------------------------------------------------------------------


def test_level_1_keeps_the_weights_and_the_graphs_over_cycles(on_device, reference):
    engine = on_device()
    assert generated(engine) == expected(reference)
    before = graphs_of(engine)
    assert before[1] > 0
    for _ in range(2):
        engine.sleep()
        assert engine.is_sleeping and engine.is_paused and engine.stats().released == PARTS
        engine.wake_up()
        assert not engine.is_sleeping and not engine.is_paused and engine.stats().released == ()
        assert generated(engine) == expected(reference)
    assert graphs_of(engine) == before


def test_level_2_needs_all_weights_before_requests_run_again(on_device, other_reference, weights):
    engine = on_device()
    generated(engine)
    before = graphs_of(engine)
    engine.sleep(2)
    engine.wake_up(["weights"])
    assert engine.is_sleeping
    engine.wake_up(["kv_cache"])
    assert not engine.is_sleeping and engine.is_paused
    with pytest.raises(EnginePaused, match="21 of them have not come since, such as lm_head.weight: update the"):
        generated(engine)
    names = sorted(weights["b"])
    engine.update_weights({name: weights["b"][name] for name in names[:10]}, version="half")
    with pytest.raises(EnginePaused, match="11 of them have not come"):
        generated(engine)
    with pytest.raises(RequestError, match="11 of them have not come"):
        engine.resume()
    engine.update_weights({name: weights["b"][name] for name in names[10:]}, version="whole")
    assert not engine.is_paused
    assert generated(engine) == expected(other_reference)
    assert graphs_of(engine) == before


def test_weights_are_updated_while_the_kv_cache_sleeps(on_device, other_reference, weights):
    engine = on_device()
    generated(engine)
    engine.sleep(2)
    engine.wake_up(["weights"])
    engine.update_weights(weights["b"], version="b")
    assert engine.is_sleeping and engine.is_paused
    engine.wake_up(["kv_cache"])
    assert not engine.is_sleeping and not engine.is_paused and engine.weight_version == "b"
    assert generated(engine) == expected(other_reference)


def test_the_kv_cache_alone_is_released(on_device, reference):
    engine = on_device()
    generated(engine)
    engine.release_kv_cache_memory()
    assert engine.is_sleeping and engine.stats().released == ("kv_cache",)
    engine.wake_up(["kv_cache"])
    assert not engine.is_sleeping and generated(engine) == expected(reference)


def test_a_sleeping_engine_can_be_closed(on_device):
    engine = on_device()
    generated(engine)
    engine.sleep()
    engine.close()


def test_released_pages_read_as_zeros(sleeper):
    generated(sleeper)
    pages = sleeper.loop.executor.worker.runner.kv.storage[0][0]
    address = pages.data_ptr()
    assert pages.count_nonzero() > 0
    sleeper.sleep()
    sleeper.wake_up()
    assert pages.count_nonzero() == 0 and pages.data_ptr() == address


def test_prefixes_are_forgotten(make_engine, reference):
    engine = make_engine(**ON)
    prompt = list(range(3, 60))
    for _ in range(2):
        greedy_tokens(engine, [prompt], 4)
    hits = engine.stats().prefix_cache_hits
    assert hits > 0
    engine.sleep()
    engine.wake_up()
    assert greedy_tokens(engine, [prompt], 4) == [reference.greedy(prompt, 4)]
    assert engine.stats().prefix_cache_hits == hits


# ---- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_frozen_requests_go_on_under_the_weights_that_are_there(
    make_engine, reference, other_reference, weights, async_scheduling, level
):
    loop = make_engine(**ON, async_scheduling=async_scheduling).loop
    loop.add(request("r", PROMPTS[2], greedy(30)))
    events = steps(loop, 9)
    loop.sleep.begin(PARTS, level == 2, "keep")
    loop.sleep.release(PARTS, level == 2)
    loop.add(request("new", PROMPTS[0], greedy(5)))
    assert (events := events + steps(loop, 3)) and not loop.can_step and loop.stats().num_waiting == 2
    begun = tokens(events)
    loop.sleep.wake_up()
    if level == 2:
        assert not loop.can_step
        loop.update_weights(weights["b"].items(), "b")
    rest = drain(loop)
    assert begun == reference.greedy(PROMPTS[2], len(begun)) and 5 < len(begun) < 12
    now = other_reference if level == 2 else reference
    assert tokens(rest["r"]) == now.greedy([*PROMPTS[2], *begun], 30 - len(begun))
    assert tokens(rest["new"]) == now.greedy(PROMPTS[0], 5)


def test_abort_ends_requests_and_refuses_new_ones(make_engine):
    loop = make_engine(**ON).loop
    loop.add(request("r", PROMPTS[0], greedy(30)))
    steps(loop, 4)
    loop.sleep.begin(PARTS, False)
    loop.sleep.release(PARTS)
    assert [(one.request_id, one.finish_reason) for one in loop.step()] == [("r", "abort")]
    with pytest.raises(EnginePaused, match="the engine sleeps: wake it up"):
        loop.add(request("new", PROMPTS[0], greedy(5)))
    loop.sleep.wake_up()
    loop.add(request("new", PROMPTS[0], greedy(5)))
    assert len(tokens(drain(loop)["new"])) == 5


@pytest.mark.parametrize("is_advanced", [False, True], ids=["another thread", "this thread"])
def test_wait_lets_running_calls_end(make_engine, reference, is_advanced):
    engine = make_engine(**ON, max_model_len=1024)
    found = []

    if is_advanced:
        samples = engine.generate_as_completed(
            prompt_token_ids=[PROMPTS[0], PROMPTS[1]], sampling_params=[greedy(50), greedy(1)]
        )
        next(samples)
        engine.sleep(mode="wait")
        assert engine.is_sleeping
        [rest] = samples
        assert rest.output.token_ids == reference.greedy(PROMPTS[0], 50)
    else:
        prompts = [PROMPTS[0]] * 2
        thread = threading.Thread(
            target=lambda: found.extend(engine.generate(prompt_token_ids=prompts, sampling_params=greedy(100)))
        )
        thread.start()
        while engine.stats().generation_tokens < 20:
            time.sleep(0.001)
        engine.sleep(mode="wait")
        assert engine.is_sleeping
        thread.join(PATIENCE)
        assert [output.token_ids for output in found] == [reference.greedy(PROMPTS[0], 100)] * 2
    engine.wake_up()


def test_level_0_only_pauses_and_needs_no_setting(make_engine, reference):
    engine = make_engine()
    engine.sleep(0, mode="keep")
    assert engine.is_sleeping and engine.is_paused and engine.stats().released == ()
    with pytest.raises(EnginePaused, match="paused"):
        generated(engine)
    engine.wake_up(["scheduling"])
    assert not engine.is_sleeping and not engine.is_paused
    engine.sleep(0)
    engine.resume()
    assert not engine.is_sleeping and generated(engine) == expected(reference)


# ---- orders --------------------------------------------------------------------------------------------------------


def test_waking_twice_and_waking_without_a_sleep_change_nothing(sleeper, reference):
    sleeper.wake_up()
    sleeper.sleep()
    sleeper.sleep()
    sleeper.wake_up()
    sleeper.wake_up()
    sleeper.wake_up(["weights"])
    assert not sleeper.is_sleeping and generated(sleeper) == expected(reference)


def test_a_pause_from_before_the_sleep_outlives_it(sleeper):
    sleeper.pause("keep")
    sleeper.sleep()
    with pytest.raises(RequestError, match="the engine sleeps"):
        sleeper.resume()
    sleeper.wake_up()
    sleeper.wake_up()
    assert sleeper.is_paused and not sleeper.is_sleeping
    sleeper.resume()
    sleeper.sleep()
    sleeper.pause("keep")  # asked for while it sleeps
    sleeper.wake_up()
    assert sleeper.is_paused
    sleeper.resume()


def test_a_pause_that_is_ended_before_the_release_stops_it(sleeper, reference):
    loop = sleeper.loop
    loop.sleep.begin(PARTS, False)
    loop.resume()
    with pytest.raises(RequestError, match="ended before the memory was released"):
        loop.sleep.release(PARTS)
    assert not sleeper.is_sleeping and generated(sleeper) == expected(reference)


def test_another_level_needs_a_wake_up_first(sleeper):
    sleeper.sleep(1)
    with pytest.raises(RequestError, match="sleeps at level 1 already: wake it up first"):
        sleeper.sleep(2)
    sleeper.wake_up(["weights"])
    sleeper.sleep(2)
    assert sleeper.stats().weights_discarded
    sleeper.wake_up()


def test_weights_that_sleep_are_neither_read_nor_written(sleeper, reference, weights):
    generated(sleeper)
    sleeper.sleep()
    for call in (
        lambda: sleeper.update_weights(weights["b"], version="b"),
        lambda: sleeper.loop.load_weights("/nowhere", "b"),
        lambda: sleeper.share_weights(torch.nn.Linear(2, 2), version="b"),
    ):
        with pytest.raises(WeightUpdateError, match="the weights sleep: wake them up first"):
            call()
    assert sleeper.weight_version == "initial"
    sleeper.wake_up()
    assert generated(sleeper) == expected(reference)


def test_graphs_that_sleep_are_not_captured(make_engine):
    engine = make_engine(**ON, warmup="background")
    engine.sleep()
    with pytest.raises(RequestError, match="the engine sleeps"):
        engine.warm()
    assert not engine.loop.capture_between_steps()
    engine.wake_up()
    assert engine.loop.capture_between_steps()


def test_shared_weights_are_not_released_but_the_kv_cache_is(make_engine, lively_model, other_model, other_reference):
    from transformers import LlamaForCausalLM

    engine = make_engine(**ON)
    trainer = LlamaForCausalLM.from_pretrained(other_model, dtype=torch.float32)
    engine.share_weights(trainer, version="b")
    for level in (1, 2):
        with pytest.raises(RequestError, match="shared with a trainer"):
            engine.sleep(level)
    assert not engine.is_paused
    engine.release_kv_cache_memory()
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(0.0)  # the trainer's step
    engine.weights_changed("step-1")
    engine.wake_up()
    assert generated(engine) == expected(other_reference) and engine.weight_version == "step-1"


def test_a_release_or_restore_without_room_leaves_an_engine_that_can_go_on(sleeper, reference, monkeypatch):
    region = type(sleeper.loop.executor.worker.runner.kv_region)

    def fail(*_, **__):
        raise GraphError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(region, "release", fail)
        with pytest.raises(EngineError, match="memory of weights can't be released: no room"):
            sleeper.sleep()
    assert not sleeper.is_sleeping and not sleeper.is_paused and generated(sleeper) == expected(reference)
    sleeper.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(region, "restore", fail)
        with pytest.raises(EngineError, match="memory of weights can't be restored: no room"):
            sleeper.wake_up()
        assert sleeper.is_sleeping and sleeper.stats().released == PARTS
    sleeper.wake_up()
    assert generated(sleeper) == expected(reference)


@pytest.mark.parametrize(
    "settings",
    [{"quantization": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"inference_cuda_graph_scope": "layer"},
     {"num_speculative_tokens": 2}, {"cuda_graph_impl": "none"}],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_every_kind_of_step_gives_the_same_tokens_after_both_levels(make_engine, weights, settings):
    engine = make_engine(**ON, **settings)
    expected = generated(engine)
    before = graphs_of(engine)
    engine.sleep()
    engine.wake_up()
    assert generated(engine) == expected
    engine.sleep(2)
    engine.wake_up()
    engine.update_weights(weights["a"], version="same")
    assert generated(engine) == expected and graphs_of(engine) == before


def test_random_orders_of_sleeps_updates_and_requests_leak_nothing_and_mix_no_weights(
    make_engine, reference, other_reference, weights
):
    """Afterwards each token follows from the weights that its span names."""
    loop = make_engine(**ON, max_num_seqs=4, graph_buckets=(4,), num_pages=24).loop
    references = {"a": reference, "b": other_reference}
    loop.rename_weights("a0")
    prompts, outputs, ended, refused = {}, {}, set(), 0
    generator = random.Random(11)

    def take(events):
        for event in events:
            name = event.request_id
            outputs[name].add(
                OutputDelta(
                    request_id=name, child_id=name, token_ids=event.token_ids, weight_version=event.weight_version
                )
            )
            if event.finish_reason is not None:
                assert name not in ended and event.finish_reason in ("length", "abort")
                ended.add(name)

    def act(action, sequence, turn):
        if action == "add":
            name = f"{sequence}.{turn}"
            prompts[name] = generator.choice(PROMPTS)
            loop.add(request(name, prompts[name], greedy(generator.randint(1, 30))))
            outputs[name] = CompletionOutput(index=0)
        elif action == "step":
            for _ in range(generator.randint(1, 4)):
                take(loop.step())
        elif action == "sleep":
            level = generator.choice((0, 1, 2))
            parts = generator.choice((parts_of_level(level), ("kv_cache",)))
            discards = level == 2 and "weights" in parts
            if loop.sleep.begin(parts, discards, generator.choice((None, "abort", "keep"))) != "wait":
                loop.sleep.release(parts, discards)
        elif action == "wake":
            loop.sleep.wake_up(generator.choice((None, ["weights"], ["kv_cache"], ["cuda_graph", "weights"])))
        elif action == "update":
            letter = generator.choice("ab")
            loop.update_weights(weights[letter].items(), f"{letter}{sequence}.{turn}")
        else:
            getattr(loop, action)(*([generator.choice(("abort", "keep"))] if action == "pause" else []))

    actions = ("add", "add", "step", "step", "step", "sleep", "wake", "wake", "update", "pause", "resume")
    for sequence in range(60):
        for turn in range(generator.randint(6, 14)):
            try:
                act(generator.choice(actions), sequence, turn)
            except (EnginePaused, RequestError, WeightUpdateError) as error:
                assert any(text in str(error) for text in ("sleep", "paused", "have not come"))
                refused += 1
        loop.scheduler.check()
        loop.sleep.wake_up()
        loop.update_weights(weights["a"].items(), f"a{sequence}")
        loop.resume()
        assert not loop.sleep.is_sleeping and loop.stats().released == ()
        while loop.has_work:
            take(loop.step())
        loop.idle_check()
    assert ended == outputs.keys() and len(ended) > 60 and refused > 20
    several = 0
    for name, output in outputs.items():
        spans = output.weight_versions
        several += len(spans) > 1
        for letter in {span.version[0] for span in spans}:
            logits = references[letter].logits([*prompts[name], *output.token_ids])[len(prompts[name]) - 1 : -1]
            for span in (one for one in spans if one.version[0] == letter):
                for place in range(span.start, span.end):
                    assert logits[place, output.token_ids[place]] >= logits[place].max() - 1e-3, (name, place, span)
    assert several > 5, "updates met running requests"


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_memory_is_released_only_if_the_setting_allows_it(make_engine):
    engine = make_engine()
    for call in (engine.sleep, lambda: engine.sleep(2), engine.release_kv_cache_memory):
        with pytest.raises(RequestError, match="enable_sleep_mode"):
            call()
    assert not engine.is_paused and not engine.is_sleeping


def test_wrong_levels_modes_and_tags_name_themselves(sleeper):
    for level in (3, -1, True, "1", 1.0):
        with pytest.raises(RequestError, match="level="):
            sleeper.sleep(level)
    with pytest.raises(RequestError, match="mode='freeze' must be one of"):
        sleeper.sleep(mode="freeze")
    with pytest.raises(RequestError, match="tags='weight' must be of weights, .*did you mean"):
        sleeper.wake_up(["weight"])
    with pytest.raises(RequestError, match="give a list"):
        sleeper.wake_up("weights")
    assert not sleeper.is_paused


def test_a_training_engine_has_no_sleep(lively_model):
    with pytest.raises(ConfigError, match="enable_sleep_mode=True is for inference"):
        EngineConfig(mode="training", **ON)
    with pytest.raises(ConfigError, match="enable_sleep_mode='yes' must be True or False"):
        Engine(EngineConfig(**(SETTINGS | {"model": str(lively_model), "enable_sleep_mode": "yes"})))
