"""Chunks of a GPTModel in the orders of Megatron's pipeline schedules, with and without graphs."""

from __future__ import annotations

import pytest
import torch

from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.schedule import Stage, max_outstanding, order_of, set_current_microbatch
from tests.support.megatron_models import gpt, tokens

STAGES = {
    "first_of_two": Stage(2, 0),
    "last_of_two": Stage(2, 1),
    "first_of_four": Stage(4, 0),
    "two_virtual_stages": Stage(2, 0, 2),
    "second_of_two_virtual_stages": Stage(2, 1, 2),
}


def chunks_of(stage):
    """Build the stage's model chunks: the first takes tokens, the last of several returns losses."""
    last = stage.chunks - 1
    return [
        gpt(index, pre_process=index == 0, post_process=index == last, hidden_dropout=0.1)
        for index in range(stage.chunks)
    ]


def train(chunks, order, steps, graphs=None):
    """Return every output, every gradient sent to an earlier stage, and all parameter gradients of each step."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.05)
    log = []
    for step in range(steps):
        optimizer.zero_grad()
        count, waiting, found = [0] * len(chunks), [[] for _ in chunks], []
        for entry in order:
            index = abs(entry) - 1
            chunk = chunks[index]
            if entry > 0:
                micro = count[index]
                count[index] += 1
                set_current_microbatch(chunk, micro)
                ids, positions = tokens(10 * step + micro)
                received = torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(micro)).requires_grad_()
                if index:
                    chunk.set_input_tensor(received)
                labels = ids.roll(-1, 1) if chunk.post_process else None
                out = chunk(ids, positions, None, labels=labels)
                out = out.mean() if chunk.post_process else out
                waiting[index].append((received, out))
                found.append(out.detach().clone())
            else:
                received, out = waiting[index].pop(0)
                out.backward(None if out.dim() == 0 else torch.full_like(out, 1e-3))
                if index:
                    found.append(received.grad.clone())
        log.append(found + [p.grad.clone() for chunk in chunks for p in chunk.parameters()])
        optimizer.step()
    return log


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_equals_eager_with_one_graph_per_outstanding_microbatch(name):
    stage = STAGES[name]
    order = order_of(stage, 4 if stage.chunks > 1 else 6)
    eager, graphed = chunks_of(stage), chunks_of(stage)
    expected = train(eager, order, 4)
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) as engine:
        engine.attach(graphed if stage.chunks > 1 else graphed[0])
        found = train(graphed, order, 4)
        table = {row["module"]: row for row in engine.graphs()}
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), f"step {step}"
    for index, most in enumerate(max_outstanding(order)):
        prefix = f"chunks.{index}." if stage.chunks > 1 else ""
        for layer in range(2):
            row = table[f"{prefix}decoder.layers.{layer}"]
            assert row["graphs"] == most and set(row["eager"]) == {"warming_up"} and row["replays"] > 0


def test_stages_capture_independently_without_a_barrier():
    """The last stage has one outstanding microbatch and captures in its first step, the first stage in its third."""
    captured = {}
    for name in ("first_of_two", "last_of_two"):
        chunks = chunks_of(STAGES[name])
        with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) as engine:
            engine.attach(chunks[0])
            captured[name] = []
            for _ in range(3):
                train(chunks, order_of(STAGES[name], 6), 1)
                captured[name].append(sum(row["replays"] for row in engine.graphs()) > 0)
    assert captured == {"first_of_two": [False, False, True], "last_of_two": [True, True, True]}
