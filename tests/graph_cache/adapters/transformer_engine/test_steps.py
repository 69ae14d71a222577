"""Whole steps from graphs with Transformer Engine's memory rules, compared with eager steps.

Transformer Engine's own captures are in test_transformer_engine_gpu.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_cache.adapters.transformer_engine import TransformerEngineGraphs
from graph_cache.errors import GraphConfigError, GraphError
from tests.graph_cache.adapters.transformer_engine.static_graphs import StaticMaker
from tests.graph_cache.adapters.transformer_engine.te_stack import (
    ONE_AT_A_TIME,
    TWO_WARMUP_FORWARDS,
    attached,
    batch,
    capture_context,
    parts,
    reasons,
    replays,
    same_parameters,
    stack,
    step,
    train,
)

# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="construction succeeds with a GPU: see test_transformer_engine_gpu.py"
)
def test_construction_without_transformer_engine_or_gpu_is_refused():
    model = stack()
    with pytest.raises(GraphConfigError) as caught:
        TransformerEngineGraphs(parts(model), ONE_AT_A_TIME, capture_context())
    for words in (
        "cuda_graph_impl='transformer_engine' was asked for",
        "no CUDA device",
        "captures on 'cpu'",
        "Install",
        "cuda_graph_impl='local'",
    ):
        assert words in str(caught.value)
    assert all("forward" not in vars(layer) for layer in model.layers)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([], "every chunk"),
        ([1, 1, -1], "each microbatch needs one"),
        ([-1, 1], "no matching forward before it"),
        ([1, 0, -1], "not a valid entry"),
        ([1, 2, -2, -1, 1, -1], "the same number"),
        ([1, -1.5, -1], "no matching backward before it"),
        ([1, 3, -3, -1], "every chunk"),
        ([1.5, -1], "not a valid entry"),
        ([1, 2, -2, -1], None),
    ],
)
def test_invalid_orders_are_refused(order, words):
    if words is None:
        attached(stack(), order).detach()  # a chunk without layers is fine
    else:
        with pytest.raises(GraphConfigError, match=words):
            attached(stack(), order)


def test_layers_outside_the_order_or_with_duplicate_names_are_refused():
    model = stack()
    with pytest.raises(GraphConfigError, match="layers of other chunks"):
        TransformerEngineGraphs(parts(model, chunk=1), ONE_AT_A_TIME, capture_context(), maker=StaticMaker())
    with pytest.raises(GraphConfigError, match="the same name"):
        TransformerEngineGraphs(
            [("a", model.layers[0]), ("a", model.layers[1])], ONE_AT_A_TIME, capture_context(), maker=StaticMaker()
        )


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [ONE_AT_A_TIME, TWO_WARMUP_FORWARDS, [1, 1, -1, -1], [1, -1, 1, -1]])
def test_losses_and_parameters_match_eager(order):
    model = stack()
    eager = copy.deepcopy(model)
    graphs = attached(model, order)
    assert train(model, order) == train(eager, order)
    assert same_parameters(model, eager)
    # A warm-up step is a step if microbatches overlap, else a microbatch. Three steps of three layers are eager.
    warming = 3 * 3 * (order.count(1) if order[1] == 1 else 1)
    assert reasons(graphs) == {"warming_up": warming}
    assert replays(graphs) == 6 * 3 * order.count(1) - warming
    graphs.detach()


def test_static_inputs_are_shared_by_non_overlapping_microbatches():
    model, maker = stack(), StaticMaker()
    graphs = attached(model, TWO_WARMUP_FORWARDS, maker)
    train(model, TWO_WARMUP_FORWARDS, steps=4)
    hidden = [next(iter(sample.values())) for sample in maker.plan.samples]
    assert len(hidden) == 3 * 4  # layers, microbatches
    assert len({tensor.data_ptr() for tensor in hidden}) == 3 * 3  # layers, outstanding at most
    graphs.detach()


def test_two_chunks_interleave():
    order = [1, 1, 2, 2, -2, 1, -2, 1, -1, 2, -1, 2, -2, -2, -1, -1]
    chunks = stack(2), stack(1)
    eager = copy.deepcopy(chunks)
    graphs = TransformerEngineGraphs(
        [*parts(chunks[0], 0), *parts(chunks[1], 1)], order, capture_context(), maker=StaticMaker()
    )

    def run(models, number):
        forwards, waiting = [0, 0], ([], [])
        for entry in order:
            chunk = abs(entry) - 1
            if entry > 0:
                for layer in models[chunk].layers:
                    layer.current_microbatch = forwards[chunk]
                waiting[chunk].append(models[chunk](batch(10 * number + 2 * forwards[chunk] + chunk)).square().mean())
                forwards[chunk] += 1
            else:
                waiting[chunk].pop(0).backward()

    for number in range(5):
        run(chunks, number)
        run(eager, number)
    grads = [parameter.grad for model in chunks for parameter in model.parameters()]
    expected = [parameter.grad for model in eager for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert replays(graphs) == 2 * 4 * 3 and set(reasons(graphs)) == {"warming_up"}
    graphs.detach()


def test_layers_without_a_microbatch_attribute_count_calls_of_a_step():
    model = stack()
    eager = copy.deepcopy(model)
    graphs = attached(model, TWO_WARMUP_FORWARDS)
    assert train(model, TWO_WARMUP_FORWARDS, numbered=False) == train(eager, TWO_WARMUP_FORWARDS, numbered=False)
    assert set(reasons(graphs)) == {"warming_up"} and replays(graphs) == 3 * 3 * 4
    graphs.detach()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_order_of_forwards_and_backwards_gives_wrong_gradients(data):
    """Graphs replay only if the order allows it; a backward that would read overwritten memory raises."""
    model = stack(2)
    eager = copy.deepcopy(model)
    graphs = attached(model, TWO_WARMUP_FORWARDS, warmup_rounds=1)
    for number in range(2):
        step(model, TWO_WARMUP_FORWARDS, [batch(number * 10 + one) for one in range(4)])
        step(eager, TWO_WARMUP_FORWARDS, [batch(number * 10 + one) for one in range(4)])
    waiting = []
    for event in range(data.draw(st.integers(2, 10))):
        if waiting and data.draw(st.booleans()):
            mine, theirs = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            try:
                mine.backward()
            except GraphError as error:
                assert "order" in str(error)
                break
            theirs.backward()
        else:
            for layer in model.layers:
                layer.current_microbatch = data.draw(st.integers(0, 5))
            x = batch(1000 + event)
            waiting.append((model(x).square().mean(), eager(x).square().mean()))
    else:
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    del waiting
    graphs.detach()
