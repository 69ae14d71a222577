"""Engine.generate: outputs for prompts and sampling params, invalid arguments, and reproducible offline runs."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ConfigError, EngineDead, ModelError, PromptTooLong, RequestError
from tests.engine.lively import PROMPTS, greedy

TOP = 3


@pytest.mark.parametrize("together", [True, False])
def test_greedy_tokens_equal_an_eager_loop_over_transformers(make_engine, reference, together):
    engine = make_engine()
    expected = [reference.greedy(prompt, 40) for prompt in PROMPTS]
    if together:
        outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(40))
    else:
        outputs = [engine.generate(prompt_token_ids=prompt, sampling_params=greedy(40))[0] for prompt in PROMPTS]
    assert [output.token_ids for output in outputs] == expected
    assert [output.prompt_token_ids for output in outputs] == [list(prompt) for prompt in PROMPTS]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert {output.weight_version for output in outputs} == {"initial"} == {engine.weight_version}


def test_text_prompts_are_tokenized_and_outputs_detokenized(make_engine, reference):
    engine = make_engine()
    texts = ["the quick brown fox", "blue"]
    outputs = engine.generate(prompts=texts, sampling_params=greedy(12, skip_special_tokens=False))
    for text, output in zip(texts, outputs, strict=True):
        ids = engine.tokenizer.encode(text)
        assert output.prompt == text and output.prompt_token_ids == ids
        assert output.token_ids == reference.greedy(ids, 12)
        whole = engine.tokenizer.decode(ids + output.token_ids, skip_special_tokens=False)
        assert output.text and text + output.text == whole
    assert engine.generate("blue", greedy(12))[0].token_ids == outputs[1].token_ids


def test_each_prompt_may_have_its_own_sampling_params(make_engine, reference):
    lengths = [3, 11, 1]
    outputs = make_engine().generate(prompt_token_ids=PROMPTS[:3], sampling_params=[greedy(n) for n in lengths])
    assert [o.token_ids for o in outputs] == [reference.greedy(p, n) for p, n in zip(PROMPTS[:3], lengths, strict=True)]


def test_sampling_params_may_be_mappings(make_engine):
    engine, fields = make_engine(), {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    params = SamplingParams(**fields)
    expected = [output.token_ids for output in engine.generate(prompt_token_ids=PROMPTS[:2], sampling_params=params)]
    for given in (fields, [fields, params]):
        outputs = engine.generate(prompt_token_ids=PROMPTS[:2], sampling_params=given)
        assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("made", [SamplingParams, EngineConfig])
def test_an_unknown_keyword_names_the_nearest_field(made):
    misspelt, field = {SamplingParams: ("max_token", "max_tokens"), EngineConfig: ("max_num_seq", "max_num_seqs")}[made]
    with pytest.raises(TypeError, match=f"{made.__name__} has no field '{misspelt}'; did you mean '{field}'"):
        made(**{misspelt: 3})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda engine: engine.generate("red", sampling_parms={}), "'sampling_parms'; did you mean 'sampling_params'"),
        (lambda engine: engine.generate("red", max_tokens=5), "'max_tokens'; give sampling_params={'max_tokens': …}"),
        (lambda engine: engine.update_weights({}, verison="b"), "'verison'; did you mean 'version'"),
        (lambda _: Engine(modle=None), "'modle'; did you mean 'model'"),
    ],
)
def test_an_unknown_argument_names_the_nearest_one(make_engine, call, said):
    with pytest.raises(TypeError, match=said):
        call(make_engine())


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        (("smollm2-135m-instruct",), {}, "found config of type str: give an EngineConfig"),
        (({"model": "policy"},), {}, "found config of type dict: give an EngineConfig"),
        ((), {"model": "policy"}, "model is the name 'policy': give it in the configuration"),
    ],
)
def test_a_model_name_in_the_wrong_place_is_refused(arguments, keywords, said):
    with pytest.raises(ConfigError, match=said):
        Engine(*arguments, **keywords)


def test_logprobs_ranks_and_alternatives_match_transformers(make_engine, reference):
    prompt = PROMPTS[0]
    output = make_engine().generate(prompt_token_ids=prompt, sampling_params=greedy(10, logprobs=TOP))[0]
    assert len(output.logprobs) == len(output.token_ids) == 10
    expected = reference.logprobs([*prompt, *output.token_ids])[len(prompt) - 1 :]
    for entry, token, row in zip(output.logprobs, output.token_ids, expected[:-1], strict=True):
        check_logprob(entry, token, row, TOP)
        assert entry.rank == 1


def test_logprobs_0_returns_only_the_sampled_token_and_none_returns_nothing(make_engine):
    engine = make_engine()
    with_zero, without = engine.generate(
        prompt_token_ids=[PROMPTS[0]] * 2, sampling_params=[greedy(4, logprobs=0), greedy(4)]
    )
    assert [entry.token_id for entry in with_zero.logprobs] == with_zero.token_ids == without.token_ids
    assert all(entry.top == {} for entry in with_zero.logprobs)
    assert without.logprobs is None


def test_max_tokens_0_scores_the_prompt_and_generates_nothing(make_engine, reference):
    outputs = make_engine().generate(
        prompt_token_ids=PROMPTS, sampling_params=SamplingParams(max_tokens=0, prompt_logprobs=TOP)
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == [] and output.text == "" and output.finish_reason == "length"
        check_prompt_scores(output.prompt_logprobs, prompt, reference)


@pytest.mark.parametrize("budget", [8, 13])
def test_prompt_logprobs_do_not_depend_on_chunked_prefill(make_engine, reference, budget):
    engine = make_engine(max_num_batched_tokens=budget)
    prompts = [list(range(3, 103)), PROMPTS[2], PROMPTS[1]]
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=greedy(5, prompt_logprobs=TOP))
    for prompt, output in zip(prompts, outputs, strict=True):
        check_prompt_scores(output.prompt_logprobs, prompt, reference)
        assert output.token_ids == reference.greedy(prompt, 5)
    assert engine.stats().steps > sum(map(len, prompts)) / budget


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 8}, {"num_pages": 20, "page_size": 4, "max_model_len": 128}], ids=str
)
def test_named_tokens_have_the_logprobs_of_transformers(make_engine, reference, settings):
    ids = [5, 90, 5, 17]
    engine = make_engine(**settings)
    params = greedy(30, logprob_token_ids=ids, prompt_logprobs=1, logprobs=1)
    outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=[params, greedy(30), params, params, params])
    assert outputs[1].logprobs is None
    for prompt, output in ((p, o) for p, o in zip(PROMPTS, outputs, strict=True) if o is not outputs[1]):
        assert output.token_ids == reference.greedy(prompt, 30)
        rows = reference.logprobs([*prompt, *output.token_ids])[:-1]
        entries = [*output.prompt_logprobs[1:], *output.logprobs]
        for entry, row in zip(entries, rows, strict=True):
            assert list(entry.named) == [5, 90, 17] and len(entry.top) == 1
            assert list(entry.named.values()) == pytest.approx([row[i].item() for i in entry.named], abs=1e-3)
    assert "page_size" not in settings or engine.stats().num_preemptions > 0


def test_named_tokens_come_without_logprobs_and_for_each_of_n_sequences(make_engine):
    params = SamplingParams(max_tokens=6, n=3, seed=4, ignore_eos=True, logprob_token_ids=[9, 2])
    [output] = make_engine().generate(prompt_token_ids=PROMPTS[0], sampling_params=params)
    first = [one.logprobs[0].named for one in output.outputs]
    assert [list(one) for one in first] == [[9, 2]] * 3 and first[0] == first[1] == first[2]
    assert all(len(one.logprobs) == 6 and not one.logprobs[0].top for one in output.outputs)
    with pytest.raises(RequestError, match="logprob_token_ids must be a list of at most 128 token ids"):
        SamplingParams(logprob_token_ids=list(range(129)))


def check_prompt_scores(scores, prompt, reference):
    assert len(scores) == len(prompt) and scores[0] is None
    rows = reference.logprobs(prompt)
    for entry, token, row in zip(scores[1:], prompt[1:], rows[:-1], strict=True):
        check_logprob(entry, token, row, TOP)


def check_logprob(entry, token, row, count):
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
    assert entry.rank == int((row > row[token]).sum()) + 1
    best = row.topk(count)
    assert list(entry.top) == best.indices.tolist()
    assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=1e-3)


def test_n_returns_n_sequences_and_the_first_equals_n_1(make_engine):
    engine = make_engine()
    params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    single = engine.generate(prompt_token_ids=PROMPTS[0], sampling_params=params)[0]
    several = engine.generate(
        prompt_token_ids=[PROMPTS[0], PROMPTS[1]],
        sampling_params=[SamplingParams(max_tokens=12, seed=7, ignore_eos=True, n=3), greedy(2)],
    )
    assert [len(output.outputs) for output in several] == [3, 1]
    first, second, third = several[0].outputs
    assert first.token_ids == single.token_ids
    assert len({tuple(one.token_ids) for one in (first, second, third)}) == 3
    assert [one.index for one in several[0].outputs] == [0, 1, 2] and several[0].finished
    assert all(one.weight_version == "initial" for one in several[0].outputs)


# ---- stopping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_truncates_the_text(make_engine, include_stop):
    engine = make_engine()
    whole = engine.generate("the old king", greedy(60))[0]
    stop = whole.text[9:12]
    cut = whole.text.index(stop) + (len(stop) if include_stop else 0)
    output = engine.generate("the old king", greedy(60, stop=(stop,), include_stop_str_in_output=include_stop))[0]
    assert output.text == whole.text[:cut]
    assert output.finish_reason == "stop" and output.stop_reason == stop
    assert 0 < len(output.token_ids) < 60 and output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert engine.stats().generation_tokens == 60 + len(output.token_ids)  # generation stopped there


def test_a_stop_token_ends_the_request_and_is_the_stop_reason(make_engine, reference):
    tokens = reference.greedy(PROMPTS[0], 20)
    stop = tokens[6]
    params = greedy(20, stop_token_ids=(stop, 319))
    output = make_engine().generate(prompt_token_ids=PROMPTS[0], sampling_params=params)[0]
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert output.finish_reason == "stop" and output.stop_reason == stop


def test_an_eos_token_ends_a_request_unless_ignored(make_engine):
    engine = make_engine()
    biased = {"temperature": 0.0, "max_tokens": 9, "logit_bias": {0: 100.0}}
    ended, ignored = engine.generate(
        prompt_token_ids=[PROMPTS[0]] * 2,
        sampling_params=[SamplingParams(**biased), SamplingParams(**biased, ignore_eos=True)],
    )
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([0], "stop", None)
    assert (ignored.token_ids, ignored.finish_reason) == ([0] * 9, "length")


@pytest.mark.parametrize("minimum", [1, 5])
def test_min_tokens_masks_eos_and_stop_tokens(make_engine, minimum):
    biased = {"temperature": 0.0, "max_tokens": 20, "min_tokens": minimum}
    engine = make_engine()
    by_eos, by_token = engine.generate(
        prompt_token_ids=[PROMPTS[0]] * 2,
        sampling_params=[
            SamplingParams(**biased, logit_bias={0: 100.0}),
            SamplingParams(**biased, logit_bias={77: 100.0}, stop_token_ids=(77,)),
        ],
    )
    for output, ending in ((by_eos, 0), (by_token, 77)):
        assert len(output.token_ids) == minimum + 1
        assert output.token_ids[-1] == ending and ending not in output.token_ids[:-1]
        assert output.finish_reason == "stop"


def test_min_tokens_delays_stop_strings(make_engine):
    engine = make_engine()
    whole = engine.generate("the old king", greedy(30))[0].text
    delayed = engine.generate("the old king", greedy(30, stop=(whole[0],), min_tokens=10))[0]
    assert len(delayed.token_ids) >= 10
    assert engine.generate("the old king", greedy(30, stop=(whole[0],)))[0].text == ""


def test_without_max_tokens_a_request_runs_to_the_end_of_the_context(make_engine, reference):
    engine = make_engine(max_model_len=64)
    outputs = engine.generate(prompt_token_ids=PROMPTS[:3], sampling_params=greedy(None))
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert len(output.token_ids) == 64 - len(prompt) and output.finish_reason == "length"
        assert output.token_ids == reference.greedy(prompt, 64 - len(prompt))


def test_a_prompt_and_its_output_may_fill_the_context_exactly(make_engine):
    engine = make_engine(max_model_len=64)
    exact = engine.generate(prompt_token_ids=[5] * 60, sampling_params=greedy(4))[0]
    assert len(exact.token_ids) == 4
    with pytest.raises(PromptTooLong):
        engine.generate(prompt_token_ids=[5] * 60, sampling_params=greedy(5))


# ---- random numbers ------------------------------------------------------------------------------------------------


def sampled(seed=None, **options):
    return SamplingParams(max_tokens=20, temperature=1.5, seed=seed, ignore_eos=True, **options)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "top_k": 50}, {"min_p": 0.02}, {"frequency_penalty": 0.7}])
def test_a_seed_samples_the_same_tokens_alone_and_in_any_batch(make_engine, options):
    engine = make_engine(enable_prefix_caching=False)
    single = [engine.generate(prompt_token_ids=p, sampling_params=sampled(11, **options))[0].token_ids for p in PROMPTS]
    fillers = [greedy(7), sampled(3), greedy(30)]
    mixed = engine.generate(
        prompt_token_ids=[*PROMPTS[:3], *PROMPTS], sampling_params=[*fillers, *[sampled(11, **options)] * len(PROMPTS)]
    )
    assert [output.token_ids for output in mixed[3:]] == single
    assert len({tuple(tokens) for tokens in single}) == len(single)


def test_an_offline_run_without_seeds_is_reproducible(make_engine):
    def run(**settings):
        engine = make_engine(**settings)
        return [
            [output.token_ids for output in engine.generate(prompt_token_ids=PROMPTS, sampling_params=sampled())]
            for _ in range(2)
        ]

    first = run()
    assert first[0] != first[1]  # the engine's sequence of seeds continues
    assert run() == first
    assert run(seed=1) != first


# ---- invalid arguments and lifecycle -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, param",
    [
        ({}, "prompts"),
        ({"prompts": "red", "prompt_token_ids": [1]}, "prompts"),
        ({"prompts": ""}, "prompts"),
        ({"prompts": ["red", ""]}, "prompts"),
        ({"prompts": ["red", 5]}, "prompts"),
        ({"prompts": 5}, "prompts"),
        ({"prompt_token_ids": [[1, 2], []]}, "prompt_token_ids"),
        ({"prompt_token_ids": [[1, 2], [320]]}, "prompt_token_ids"),
        ({"prompt_token_ids": [[1, 2], [-1]]}, "prompt_token_ids"),
        ({"prompt_token_ids": [[1, 2], [1.5]]}, "prompt_token_ids"),
        ({"prompt_token_ids": [[1, 2], 3]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, [2]]}, "prompt_token_ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
        ({"prompt_token_ids": 12}, "prompt_token_ids"),
        ({"prompt_token_ids": [[1, 2], [3] * 256]}, "prompt_token_ids"),
        ({"prompt_token_ids": [[1, 2], [3] * 200], "sampling_params": greedy(100)}, "max_tokens"),
        ({"prompt_token_ids": [[1]], "sampling_params": [greedy(), greedy()]}, "sampling_params"),
        ({"prompt_token_ids": [[1]], "sampling_params": [{"max_tokens": -3}]}, "max_tokens"),
        ({"prompt_token_ids": [[1]], "sampling_params": {"temprature": 0.5}}, "temprature"),
        ({"prompt_token_ids": [[1]], "sampling_params": [None]}, "sampling_params"),
        ({"prompt_token_ids": [[1]], "sampling_params": "greedy"}, "sampling_params"),
        ({"prompt_token_ids": [[1]], "sampling_params": 3}, "sampling_params"),
        ({"prompt_token_ids": [[1]], "sampling_params": greedy(logit_bias={320: 1.0})}, "logit_bias"),
        ({"prompt_token_ids": [[1]], "sampling_params": greedy(logit_bias={320: 1.0})}, "logit_bias"),
    ],
)
def test_an_invalid_argument_names_the_field_and_runs_nothing(make_engine, arguments, param):
    engine = make_engine()
    with pytest.raises(RequestError) as raised:
        engine.generate(**arguments)
    assert raised.value.param == param
    assert engine.stats().steps == 0
    engine.idle_check()


def test_an_empty_prompt_list_returns_no_outputs(make_engine):
    assert make_engine().generate(prompts=[]) == []


def test_a_model_without_a_tokenizer_serves_token_ids_only(tmp_path, make_engine):
    from benchmarks.shapes import write_shape

    engine = make_engine(model=write_shape("tiny", tmp_path), load_format="dummy")
    output = engine.generate(prompt_token_ids=[1, 2, 3], sampling_params=greedy(5))[0]
    assert len(output.token_ids) == 5 and output.text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.generate(prompts="red")
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.generate(prompt_token_ids=[1], sampling_params=greedy(5, stop=("x",)))
    again = make_engine(model=write_shape("tiny", tmp_path), load_format="dummy")
    assert again.generate(prompt_token_ids=[1, 2, 3], sampling_params=greedy(5))[0].token_ids == output.token_ids


def test_two_engines_in_one_process_do_not_share_state(make_engine, reference, other_model, other_reference):
    one, other = make_engine(), make_engine(model=str(other_model))
    for _ in range(2):
        assert one.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(9))[0].token_ids == reference.greedy(
            PROMPTS[0], 9
        )
        assert other.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(9))[
            0
        ].token_ids == other_reference.greedy(PROMPTS[0], 9)


def test_embedding_starts_no_thread_and_sets_no_signal_handler(config):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = set(threading.enumerate())
    with Engine(config()) as engine:
        engine.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(4))
        assert set(threading.enumerate()) == threads
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_progress_is_shown_only_on_request(make_engine, capfd, caplog):
    caplog.set_level("INFO", "engine.utils.progress")
    engine = make_engine()
    engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(2))
    assert capfd.readouterr() == ("", "")
    engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(2, n=2), use_tqdm=True)
    assert "generating: 10 of 10 sequences" in caplog.text and capfd.readouterr() == ("", "")


def test_a_closed_engine_raises_and_closing_twice_is_a_no_op(config):
    with Engine(config()) as engine:
        engine.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(2))
    engine.close()
    for call in (lambda: engine.generate("red"), engine.warm, lambda: engine.update_weights([], version="a")):
        with pytest.raises(EngineDead, match="closed"):
            call()


def test_an_interrupted_call_leaves_the_engine_usable(make_engine, reference, monkeypatch):
    engine = make_engine()
    engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(3))
    cache = engine.loop.executor.worker.runner.cache

    check, calls = cache.check_addresses, []

    def interrupt(**options):
        calls.append(1)
        if (
            len(calls) % 4 == 0
        ):  # a check between the copy of a result to the host and its reading, not a step's first one
            raise KeyboardInterrupt
        return check()

    for _ in range(3):
        monkeypatch.setattr(cache, "check_addresses", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(20))
        monkeypatch.undo()
        engine.idle_check()
    outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(20))
    assert [output.token_ids for output in outputs] == [reference.greedy(prompt, 20) for prompt in PROMPTS]


def test_a_missing_model_is_named_in_the_error(tmp_path):
    with pytest.raises(ModelError, match="missing"):
        Engine(EngineConfig(model=str(tmp_path / "missing")))


def test_dtype_float32_on_a_cpu_is_honoured(make_engine):
    engine = make_engine()
    assert (engine.info.dtype, engine.info.device, engine.info.max_model_len) == ("float32", "cpu", 256)
    assert next(engine.loop.executor.worker.runner.model.parameters()).dtype is torch.float32
