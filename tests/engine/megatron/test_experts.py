"""Training and serving a Megatron-Core model with experts in one process, on one set of weights."""

from __future__ import annotations

import pytest
import torch

from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.dropless import DroplessExperts
from tests.engine.megatron.test_model import PROMPTS, generate_greedy, greedy, serve
from tests.support.megatron_fixtures import experts_on_cpu
from tests.support.megatron_models import EXPERTS, FIXED, gpt, loss_of, tokens

__all__ = ["experts_on_cpu"]  # a fixture
pytestmark = pytest.mark.usefixtures("experts_on_cpu")
PARTIAL = ["attn", "moe_router", "moe_preprocess"]


def alternate(engine, training, model, reference):
    """Train model and reference, and generate inside every fourth step; nothing may be captured twice or copied."""
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    optimizers = {one: torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference)}
    captures = None
    for iteration in range(3):
        for step in range(4):
            for one, optimizer in optimizers.items():
                losses = [loss_of(one, *tokens(8 * iteration + 2 * step + micro)) for micro in range(2)]
                if one is model and step == 3:  # inside a training step, between forward and backward
                    engine.weights_changed(f"round {iteration}")
                    assert generate_greedy(engine) == [greedy(reference, prompt, 12) for prompt in PROMPTS]
                for loss in losses:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if captures is None:
            captures = len(training.graphs()), [row["capture_seconds"] for row in engine.graphs()]
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert captures == (len(training.graphs()), [row["capture_seconds"] for row in engine.graphs()])
    assert all(row["replays"] == 2 * 10 and row["failed"] == 0 for row in training.graphs()), training.graphs()
    assert sum(count for _, count in engine.stats().graphs["replays"]) > 0
    training.detach()
    engine.close()


@pytest.mark.parametrize("scope", ["layer", "block"])
@pytest.mark.parametrize("modules", [PARTIAL, ["moe"]], ids=["partial", "whole"])
def test_training_captures_parts_and_inference_whole_layers_in_turn(scope, modules):
    """The capacity is that of all tokens, so none is dropped and the batch does not matter."""
    model, reference = gpt(**FIXED), gpt(**FIXED)
    engine = serve(model, warmup="full", inference_cuda_graph_scope=scope)
    training = Engine(
        EngineConfig(mode="training", cuda_graph_modules=modules, cuda_graph_warmup_steps=2), pool=engine.pool
    )
    training.attach(model)
    alternate(engine, training, model, reference)


def test_attached_dropless_experts_are_served_in_graphs():
    """Attached first, since Megatron's own dispatch reads counts on the host, which fails to be captured."""
    model, reference = (gpt(**EXPERTS | {"normalization": "LayerNorm"}) for _ in range(2))
    DroplessExperts([reference]).begin()
    training = Engine(EngineConfig(mode="training", cuda_graph_moe_dropless=True, cuda_graph_warmup_steps=2))
    training.attach(model)
    alternate(serve(model, warmup="full"), training, model, reference)
