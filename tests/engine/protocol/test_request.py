"""Validation of sampling parameters, splitting of requests, and the request state machine."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError, RequestError
from engine.protocol.request import (
    EngineRequest,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    check_prompt_ids,
    mix64,
    resolve_seed,
    split_n,
)
from engine.protocol.sampling_params import LogitBias
from engine.scheduling.request import Request, RequestState

HUGE = 10**5000  # more digits than Python prints
INTEGERS = {
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "n": (1, 128),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (-1, 2**31 - 1),
    "prompt_logprobs": (-1, 2**31 - 1),
}
NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def type_id(value) -> str:
    """Return a test id for a value that may be too long to print."""
    return type(value).__name__


def expect_rejection(**fields) -> RequestError:
    """Return the error that the constructor and `from_dict` raise; it must name the field."""
    (name,) = fields
    with pytest.raises(RequestError) as direct:
        SamplingParams(**fields)
    with pytest.raises(RequestError) as from_json:
        SamplingParams.from_dict(fields)
    assert direct.value.param == from_json.value.param == name
    assert name in str(direct.value)
    assert len(str(direct.value)) < 400
    return direct.value


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, "3", 2.0, math.nan, math.inf, [1], {}, b"1", HUGE, -HUGE, 2**63, -(2**63) - 1],
                         ids=type_id)  # fmt: skip
def test_integer_field_rejects_non_integers_and_out_of_range_values(name, value):
    expect_rejection(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_field_accepts_its_bounds_only(name):
    low, high = INTEGERS[name]
    extra = {"max_tokens": None} if name == "min_tokens" else {}
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}, **extra), name) == max(value, 0 if name == "top_k" else value)
    expect_rejection(**{name: low - 1})
    expect_rejection(**{name: high + 1})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", [True, "0.5", math.nan, math.inf, -math.inf, [0.5], {}, HUGE, -HUGE, 1e308, -1e308], ids=type_id
)
def test_number_field_rejects_non_numbers_and_out_of_range_values(name, value):
    expect_rejection(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_number_field_accepts_its_bounds_only(name):
    low, high = NUMBERS[name]
    if name == "top_p":
        expect_rejection(top_p=0.0)
        low = 5e-324
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    expect_rejection(**{name: math.nextafter(low, -math.inf) if name != "top_p" else -5e-324})
    expect_rejection(**{name: math.nextafter(high, math.inf)})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", [], math.nan])
def test_flag_rejects_non_booleans(name, value):
    expect_rejection(**{name: value})


@pytest.mark.parametrize(
    "stop",
    ["", ["a", ""], [1], {"a": 1}, 3, "x" * 1025, ["x"] * 65, b"a", "\ud800", ["ok", "\udfff"], [["a"]], [None]],
    ids=type_id,
)
def test_stop_rejects_invalid_stop_strings(stop):
    expect_rejection(stop=stop)


def test_stop_accepts_a_string_or_list_and_becomes_a_tuple():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "😀" * 1024]).stop == ("a", "😀" * 1024)
    assert len(SamplingParams(stop=["x"] * 64).stop) == 64


@pytest.mark.parametrize("ids", [5, "5", [True], [-1], [1.0], ["1"], [HUGE], [2**63], [0] * 1025, {1: 2}, [None]],
                         ids=type_id)  # fmt: skip
def test_stop_token_ids_rejects_invalid_lists(ids):
    expect_rejection(stop_token_ids=ids)


@pytest.mark.parametrize(
    "bias",
    [5, [1], {-1: 1}, {1: 100.5}, {1: -101}, {1: math.nan}, {1: "2"}, {1: True}, {1.0: 1}, {True: 1}, {HUGE: 1},
     {1: HUGE}, dict.fromkeys(range(4097), 1.0), {None: 1}], ids=type_id,
)  # fmt: skip
def test_logit_bias_rejects_invalid_mappings(bias):
    expect_rejection(logit_bias=bias)


@pytest.mark.parametrize(
    "key", ["", "-1", "+1", "01", " 1", "1.0", "１", "a", "9" * 30, "9" * 5000, "1_0"], ids=type_id
)
def test_logit_bias_string_key_must_be_a_plain_number(key):
    with pytest.raises(RequestError) as error:
        SamplingParams.from_dict({"logit_bias": {key: 1.0}})
    assert error.value.param == "logit_bias"


def test_logit_bias_string_keys_become_ids_and_may_not_repeat():
    assert SamplingParams.from_dict({"logit_bias": {"17": -100, "0": 2}}).logit_bias == {17: -100.0, 0: 2.0}
    with pytest.raises(RequestError, match="17 .*twice"):
        SamplingParams.from_dict({"logit_bias": {"17": 1, 17: 2}})


def test_check_vocab_names_the_out_of_range_id():
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocab(10)
    for params, field in ((SamplingParams(logit_bias={10: 1.0}), "logit_bias"),
                          (SamplingParams(stop_token_ids=[3, 10]), "stop_token_ids")):  # fmt: skip
        with pytest.raises(RequestError, match="10.*ends at 9") as error:
            params.check_vocab(10)
        assert error.value.param == field


def test_parameters_for_a_vocabulary_have_only_what_it_has():
    params = SamplingParams(stop_token_ids=[3, 10, 2**20], logprobs=-1, prompt_logprobs=2)
    assert params.for_vocab(2**21) == dataclasses.replace(params, logprobs=2**21)
    assert params.for_vocab(10) == dataclasses.replace(params, stop_token_ids=(3,), logprobs=10)
    plain = SamplingParams(stop_token_ids=[3])
    assert plain.for_vocab(4) is plain
    with pytest.raises(RequestError, match="ends at 9"):
        SamplingParams(allowed_token_ids=[10], stop_token_ids=[10]).for_vocab(10)


def test_min_tokens_cannot_exceed_max_tokens():
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=5000, max_tokens=None).min_tokens == 5000
    error = expect_rejection(min_tokens=17)
    assert "max_tokens=16" in str(error)


def test_values_are_normalised():
    params = SamplingParams(top_k=-1, temperature=1, max_tokens=np.int64(3), top_p=np.float32(0.5), stop_token_ids=[2])
    assert (params.top_k, params.stop_token_ids, params.max_tokens) == (0, (2,), 3)
    assert type(params.temperature) is float and type(params.max_tokens) is int and params.top_p == 0.5
    assert SamplingParams(temperature=9e-6).is_greedy and SamplingParams(temperature=9e-6).temperature == 0.0
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_params_are_frozen_hashable_and_picklable():
    params = SamplingParams(logit_bias={3: 1.5}, stop=["a"], stop_token_ids=[1], seed=-7)
    twin = pickle.loads(pickle.dumps(params))
    assert twin == params and hash(twin) == hash(params)
    assert params != dataclasses.replace(params, logit_bias={3: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
    with pytest.raises(TypeError):
        params.logit_bias[3] = 2.0


def test_logit_bias_is_a_copy():
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 50.0
    assert params.logit_bias[3] == 1.0
    direct = LogitBias(bias)
    bias[3] = 1000.0
    assert direct == {3: 50.0}


def test_logit_bias_is_validated_for_any_mapping_type():
    expect_rejection(logit_bias=LogitBias({3: 1000.0}))


def test_from_dict_names_the_nearest_key():
    with pytest.raises(RequestError, match="'temprature'.*did you mean 'temperature'") as error:
        SamplingParams.from_dict({"temprature": 1.0})
    assert error.value.param == "temprature"
    with pytest.raises(RequestError, match="known: max_tokens"):
        SamplingParams.from_dict({"zzzzzzzz": 1})
    with pytest.raises(RequestError, match="unknown"):
        SamplingParams.from_dict({5: 1})
    with pytest.raises(RequestError) as error:
        SamplingParams.from_dict({"k" * 100_000: 1})
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("values", [None, [], "x", 3, [("n", 1)]])
def test_from_dict_rejects_non_objects(values):
    with pytest.raises(RequestError) as error:
        SamplingParams.from_dict(values)
    assert error.value.param == "sampling_params"


def test_from_dict_treats_null_as_unset():
    nulls = {field.name: None for field in dataclasses.fields(SamplingParams) if field.name != "max_tokens"}
    assert SamplingParams.from_dict(nulls) == SamplingParams()
    assert SamplingParams.from_dict({"max_tokens": None}).max_tokens is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]) | st.text(), json_values))
def test_any_json_is_accepted_or_rejected_by_field_name(values):
    try:
        params = SamplingParams.from_dict(values)
    except RequestError as error:
        assert error.param in values or error.param in {str(key)[:64] for key in values}
    else:
        assert SamplingParams.from_dict(dataclasses.asdict(params)) == params


def engine_request(**fields) -> EngineRequest:
    values = {"request_id": "r", "prompt_token_ids": [1, 2, 3], "params": SamplingParams()} | fields
    return EngineRequest(**values)


def test_engine_request_resolves_its_seed():
    assert engine_request(params=SamplingParams(seed=-5)).seed == -5
    assert engine_request(params=SamplingParams(seed=-5), seed=8).seed == 8
    seeds = {engine_request().seed for _ in range(8)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_engine_request_rejects_n_above_one():
    with pytest.raises(RequestError) as error:
        engine_request(params=SamplingParams(n=2))
    assert error.value.param == "n"


def test_split_gives_each_sequence_an_id_a_seed_and_n_of_one():
    params = SamplingParams(n=128, seed=11, top_k=5)
    children = split_n("id", params, resolve_seed(params))
    assert [child.index for child in children] == list(range(128))
    assert [child.request_id for child in children] == [f"id#{k}" for k in range(128)]
    assert {child.params for child in children} == {dataclasses.replace(params, n=1)}
    assert len({child.seed for child in children}) == 128
    assert all(-(2**63) <= child.seed < 2**63 for child in children)
    assert children[0].seed == 11
    assert split_n("id", params, 11) == children
    assert [child.seed for child in split_n("id", SamplingParams(n=2), 11)] == [c.seed for c in children[:2]]
    for child in children:
        engine_request(request_id=child.request_id, params=child.params, seed=child.seed)


def test_split_of_one_keeps_id_and_seed():
    (child,) = split_n("id", SamplingParams(), 7)
    assert (child.request_id, child.index, child.seed) == ("id", 0, 7)


def test_mix64_is_the_published_finalizer():
    # The first outputs of splitmix64 with seed 1234567, published with its reference implementation.
    golden = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix64(1234567 + k * golden) % 2**64 for k in (1, 2, 3)] == published


@pytest.mark.parametrize("ids", [[], "abc", None, 5, [True], [1.0], [-1], ["1"], [10], [HUGE], {1: 2}, [[1]]],
                         ids=type_id)  # fmt: skip
def test_prompt_rejects_invalid_token_ids(ids):
    with pytest.raises(RequestError) as error:
        check_prompt_ids(ids, 10)
    assert error.value.param == "prompt_token_ids"


def test_prompt_is_returned_as_a_list():
    assert check_prompt_ids((1, np.int64(9)), 10) == [1, 9]


ALLOWED = {
    ("WAITING", "RUNNING"), ("WAITING", "ABORTED"), ("WAITING", "FAILED"),
    ("RUNNING", "PREEMPTED"), ("RUNNING", "FINISHED"), ("RUNNING", "ABORTED"), ("RUNNING", "FAILED"),
    ("PREEMPTED", "RUNNING"), ("PREEMPTED", "ABORTED"), ("PREEMPTED", "FAILED"),
}  # fmt: skip
PATH_TO = {
    "WAITING": [], "RUNNING": ["RUNNING"], "PREEMPTED": ["RUNNING", "PREEMPTED"],
    "FINISHED": ["RUNNING", "FINISHED"], "ABORTED": ["ABORTED"], "FAILED": ["FAILED"],
}  # fmt: skip


@pytest.mark.parametrize("old", PATH_TO)
@pytest.mark.parametrize("new", PATH_TO)
def test_state_allows_only_listed_transitions(old, new):
    request = Request(engine_request())
    for name in PATH_TO[old]:
        request.state = RequestState[name]
    if (old, new) in ALLOWED:
        request.state = RequestState[new]
        assert request.state is RequestState[new]
    else:
        with pytest.raises(EngineError, match=f"'r' can't go from {old.lower()} to {new.lower()}"):
            request.state = RequestState[new]
        assert request.state is RequestState[old]
    assert RequestState[old].is_final == (old in ("FINISHED", "ABORTED", "FAILED"))


def test_request_separates_prompt_and_output():
    source = engine_request(priority=3)
    request = Request(source, weight_version="v1")
    request.token_ids += [7, 8]
    assert (request.prompt_len, request.output_len, request.output_ids) == (3, 2, [7, 8])
    assert source.prompt_token_ids == [1, 2, 3]
    assert (request.request_id, request.priority, request.params, request.seed, request.arrival_time) == (
        "r", 3, source.params, source.seed, source.arrival_time)  # fmt: skip
    assert "waiting" in repr(request)


def test_messages_are_picklable():
    event = TokenEvent(request_id="r", token_ids=[1], logprobs=[TokenLogprob(1, -0.5, 1, {1: -0.5})])
    source = engine_request()
    assert pickle.loads(pickle.dumps((event, source))) == (event, source)
