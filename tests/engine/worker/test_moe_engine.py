"""Engines on families with experts: updated experts serve without a new capture, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine
from engine.errors import WeightUpdateError
from engine.loader.weights import load_hf_folder
from tests.engine.lively import PROMPTS, Reference
from tests.support.engines import DEVICES, engines, greedy_tokens
from tests.support.families import WITH_EXPERTS, load_reference, tiny_folder

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")  # from Triton: Python's ast, numpy scalars
COUNT = 12


LAYOUTS = {"mixtral", "gpt_oss", "granitemoe"}  # of experts in a checkpoint


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[] if one in LAYOUTS else [pytest.mark.slow]) for one in WITH_EXPERTS],
)
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(request.param, tmp_path_factory.mktemp(request.param), tiny_model)


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines with settings; each is checked for leaks and closed after the test."""
    with engines(model=str(folder), device=request.param, page_size=8) as make:
        yield make


@pytest.mark.parametrize("stacked", [True, False])
def test_updated_experts_serve_without_a_new_capture(make, folder, stacked):
    """`stacked`: the update has the names of transformers' modules, else those of the engine's export."""
    engine = make(warmup="full")
    captures = dict(engine.stats().graphs["captures"])
    changed = Reference(folder)
    changed.model = load_reference(folder)
    own = {name: tensor for name, tensor in changed.model.named_parameters() if ".experts." in name}
    with torch.no_grad():
        for tensor in own.values():
            tensor.mul_(-0.5)
    update: Any = list(own.items())
    if not stacked:
        weights = load_hf_folder(folder, torch.float32, "cpu")[1].named_weights()
        layer = ("model.layers.",)
        routed = ("experts.", "input_linear.", "output_linear.")
        update = [
            (name, tensor * -0.5)
            for name, tensor in weights
            if name.startswith(layer) and any(part in name for part in routed) and "shared" not in name
        ]
    before = greedy_tokens(engine, PROMPTS, COUNT)
    engine.update_weights(update, version="other")
    assert greedy_tokens(engine, PROMPTS, COUNT) == [changed.greedy(prompt, COUNT) for prompt in PROMPTS]
    assert before != greedy_tokens(engine, PROMPTS, COUNT)
    assert dict(engine.stats().graphs["captures"]) == captures
    with pytest.raises(WeightUpdateError, match="experts.9.down"):
        engine.update_weights([("model.layers.0.mlp.experts.9.down", torch.zeros(3, 3))], version="bad")


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one(folder):
    with engines(model=str(folder), device="cpu", page_size=8) as make:
        wanted = greedy_tokens(make(), PROMPTS, COUNT)
        assert greedy_tokens(make(tensor_parallel_size=2), PROMPTS, COUNT) == wanted
