"""Weight updates in a running engine: in place, all or nothing; moved weights; values that are not finite."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from engine import SamplingParams
from engine.errors import RequestError, WeightUpdateError
from engine.loader.weights import iterate_safetensors
from engine.protocol.request import EngineRequest
from tests.engine.lively import MANY, PROMPTS, greedy

LADDER = (1, 2, 4, 8)
PROMPT = list(range(3, 53))


def captures(engine) -> Counter:
    return Counter(dict(engine.stats().graphs["captures"]))


def addresses(engine) -> dict[str, int]:
    model = engine.loop.executor.worker.runner.model
    return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def weights_of(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.loop.executor.worker.runner.model.named_weights()}


def answers(engine, count: int = 12) -> list[list[int]]:
    outputs = engine.generate(prompt_token_ids=[*PROMPTS, PROMPT], sampling_params=greedy(count))
    return [output.token_ids for output in outputs]


def expected(reference, count: int = 12) -> list[list[int]]:
    return [reference.greedy(prompt, count) for prompt in (*PROMPTS, PROMPT)]


# ---- updates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["block", "layer"])
def test_an_update_writes_in_place_and_keeps_every_graph(make_engine, reference, other_reference, other_model, scope):
    engine = make_engine(warmup="full", graph_buckets=LADDER, inference_cuda_graph_scope=scope)
    assert answers(engine) == expected(reference)
    before, old_addresses = captures(engine), addresses(engine)
    written = engine.update_weights(iterate_safetensors(other_model), version="second")
    assert written == len(list(iterate_safetensors(other_model)))
    assert answers(engine) == expected(other_reference)
    assert captures(engine) == before and not engine.stats().graphs["invalidations"]
    assert addresses(engine) == old_addresses
    assert not [labels for labels, _ in engine.stats().graphs["fallbacks"] if labels[0] == "decode"]
    assert engine.weight_version == engine.stats().weight_version == "second"


def test_outputs_report_their_weight_version(make_engine, other_model):
    engine = make_engine()
    assert engine.generate(prompt_token_ids=PROMPT, sampling_params=greedy(2))[0].weight_version == "initial"
    engine.update_weights(iterate_safetensors(other_model), version="step-12")
    [output] = engine.generate(prompt_token_ids=PROMPT, sampling_params=greedy(2, n=2))
    assert output.weight_version == "step-12" and {one.weight_version for one in output.outputs} == {"step-12"}


def test_partial_updates_are_accepted(make_engine, other_model):
    part = {name: tensor for name, tensor in iterate_safetensors(other_model) if "layers.1." in name}
    updated, full = make_engine(), make_engine()
    updated.update_weights(part.items(), version="part")
    whole = weights_of(full) | part
    full.update_weights(whole.items(), version="whole")
    assert answers(updated) == answers(full)
    assert weights_of(updated).keys() == whole.keys()


def test_prefix_kv_of_older_weights_is_never_reused(make_engine, reference, other_reference, lively_model, other_model):
    engine = make_engine()
    for folder, expected_model in ((other_model, other_reference), (lively_model, reference)) * 2:
        engine.update_weights(iterate_safetensors(folder), version="always the same name")
        first, second = (engine.generate(prompt_token_ids=PROMPT, sampling_params=greedy(9))[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 48)
        assert first.token_ids == second.token_ids == expected_model.greedy(PROMPT, 9)


def test_a_running_request_is_recomputed_and_continues_with_the_new_weights(
    make_engine, reference, other_reference, other_model
):
    loop = make_engine().loop
    loop.add(EngineRequest(request_id="a", prompt_token_ids=PROMPT, params=greedy(20, prompt_logprobs=0)))
    events = [event for _ in range(8) for event in loop.step()]
    loop.update_weights(iterate_safetensors(other_model), "second")
    while loop.has_work:
        events += loop.step()
    tokens = [token for event in events for token in event.token_ids]
    assert tokens[:8] == reference.greedy(PROMPT, 8)
    assert tokens[8:] == other_reference.greedy([*PROMPT, *tokens[:8]], 12)
    assert [event.weight_version for event in events] == ["initial"] * 8 + ["second"] * 12
    assert [event.prompt_logprobs is not None for event in events] == [True] + [False] * 19


@pytest.mark.parametrize(
    "spoil", ["unknown name", "wrong shape", "twice", "integers", "no pair", "fails midway", "nothing"]
)
def test_a_rejected_update_changes_nothing(make_engine, reference, other_model, spoil):
    engine = make_engine(warmup="full", graph_buckets=LADDER)
    engine.generate(prompt_token_ids=PROMPT, sampling_params=greedy(2))
    before, old_addresses, graphs = weights_of(engine), addresses(engine), captures(engine)

    def spoiled():
        good = list(iterate_safetensors(other_model))
        name, tensor = good[-1]
        yield from () if spoil == "nothing" else good[:-1]
        if spoil == "fails midway":
            raise OSError("the trainer went away")
        yield from {
            "unknown name": [(name + "s", tensor)],
            "wrong shape": [(name, tensor[:-1])],
            "nothing": [],
            "twice": [(name, tensor), (name, tensor)],
            "integers": [(name, tensor.long())],
            "no pair": [name],
        }[spoil]

    with pytest.raises(OSError if spoil == "fails midway" else WeightUpdateError):
        engine.update_weights(spoiled(), version="second")
    after = weights_of(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert addresses(engine) == old_addresses and captures(engine) == graphs and engine.weight_version == "initial"
    output = engine.generate(prompt_token_ids=PROMPT, sampling_params=greedy(9))[0]
    assert output.cached_tokens == 48 and output.weight_version == "initial"
    assert output.token_ids == reference.greedy(PROMPT, 9)


@pytest.mark.parametrize("version", ["", None, 3])
def test_an_invalid_version_is_rejected_before_any_write(make_engine, reference, other_model, version):
    engine = make_engine()
    with pytest.raises(RequestError, match="version"):
        engine.update_weights(iterate_safetensors(other_model), version=version)
    assert answers(engine) == expected(reference)


# ---- weights that moved --------------------------------------------------------------------------------------------


def move_data(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data.flip(0).clone()


def replace_parameter(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().flip(0).clone(), requires_grad=False)


@pytest.mark.parametrize("warmup", ["lazy", "full"])
@pytest.mark.parametrize("scope", ["block", "layer"])
@pytest.mark.parametrize("move", [move_data, replace_parameter])
def test_a_moved_weight_is_detected_and_its_old_address_never_read(make_engine, warmup, scope, move, caplog):
    settings = {"inference_cuda_graph_scope": scope, "warmup": warmup, "enable_prefix_caching": False}
    graphed, eager = make_engine(**settings), make_engine(**settings | {"inference_cuda_graph_scope": "none"})
    before = answers(graphed)
    for engine in (graphed, eager):
        move(engine.loop.executor.worker.runner.model.layers[1].mlp.down)
    for _ in range(2):
        found = answers(graphed)
        assert found == answers(eager) != before
    assert Counter(dict(graphed.stats().graphs["invalidations"])) == {("stale_address",): 1}
    assert "model.layers.1.mlp.down.weight" in caplog.text
    assert captures(graphed)["decode", scope, "stale_address"] == 1
    assert all(row["state"] == "captured" for row in graphed.graphs() if row["site"] == "decode")


@pytest.mark.parametrize("warmup", ["lazy", "full"])
def test_a_moved_weight_is_detected_before_the_next_replay(make_engine, warmup):
    """A one-token prompt starts with a decode step, so no eager step can detect the move first."""
    graphed, eager = make_engine(warmup=warmup), make_engine(inference_cuda_graph_scope="none")
    found = []
    for _ in range(2):
        for engine in (graphed, eager):
            found.append(engine.generate(prompt_token_ids=[17], sampling_params=greedy(5))[0].token_ids)
            move_data(engine.loop.executor.worker.runner.model.lm_head)
    assert found[0] == found[1] != found[2] == found[3]


# ---- weights that are not finite, or whose products are not --------------------------------------------------------

HUGE = 3e38  # sums of products with it are infinite in float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e300])
def test_an_update_with_values_that_are_not_finite_is_refused_by_name(make_engine, reference, value):
    engine = make_engine()
    weights = {name: tensor.clone() for name, tensor in engine.loop.executor.worker.runner.model.named_weights()}
    spoiled = [name for name in weights if "v_proj" in name]
    for name in spoiled:
        weights[name] = weights[name].double()
        weights[name][-1, -1] = value  # -1e300 is infinite in float32 only
    with pytest.raises(WeightUpdateError) as refusal:
        engine.update_weights(weights, version="spoiled")
    assert all(f"{name} contains NaN or infinity as torch.float32" in str(refusal.value) for name in spoiled)
    assert engine.weight_version == "initial" and answers(engine) == expected(reference)


def spoil(engine) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    huge = torch.full_like(dict(engine.loop.executor.worker.runner.model.named_weights())[name], HUGE)
    engine.update_weights([(name, huge)], version="spoiled")


@pytest.mark.parametrize(
    "params",
    [
        greedy(9),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, top_k=5),
        SamplingParams(max_tokens=0, prompt_logprobs=2),
    ],
)
def test_weights_with_infinite_products_fail_requests_until_the_next_good_update(
    make_engine, reference, lively_model, params
):
    engine = make_engine(num_pages=40)
    engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(3))
    spoil(engine)
    for _ in range(2):
        outputs = engine.generate(prompt_token_ids=[*PROMPTS, PROMPT], sampling_params=params)
        assert {output.finish_reason for output in outputs} == {"error"}
        assert all("not finite" in output.outputs[0].error and not output.token_ids for output in outputs)
        engine.idle_check()
    engine.update_weights(iterate_safetensors(lively_model), version="good")
    outputs = engine.generate(prompt_token_ids=MANY, sampling_params=greedy(40))
    assert [output.token_ids for output in outputs] == [reference.greedy(prompt, 40) for prompt in MANY]
    assert answers(engine) == expected(reference)
    assert engine.stats().ended["error"] == 12


def test_a_running_request_that_hits_nan_keeps_its_earlier_tokens(make_engine, reference):
    loop = make_engine().loop
    loop.add(EngineRequest(request_id="a", prompt_token_ids=PROMPT, params=greedy(20)))
    events = [event for _ in range(5) for event in loop.step()]
    loop.executor.worker.runner.model.norm.weight.data.fill_(float("nan"))
    while loop.has_work:
        events += loop.step()
    assert [token for event in events for token in event.token_ids] == reference.greedy(PROMPT, 5)
    assert events[-1].finish_reason == "error" and "not finite" in events[-1].error
    assert f" at position {len(PROMPT) + 5} of " in events[-1].error
    assert len(events) == 6
