"""Adapter rows: requests with and without adapters in a batch, beside transformers with the same change to its layers.

The toy model adds a vector of the row's adapter to what each layer returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, EngineConfig
from engine.client.async_client import make_client
from engine.core.loop import EngineLoop
from engine.errors import ModelError, RequestError
from engine.models.adapters import AdapterRows
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.dense import FAMILIES
from engine.models.interface import ForwardContext
from engine.models.layer import DecoderLayer
from engine.models.options import LayerOptions
from engine.models.registry import Entry
from engine.protocol.request import EngineRequest
from tests.engine.lively import SETTINGS, drain, greedy, tokens
from tests.support.engines import DEVICES, engines
from tests.support.families import load_reference, tiny_folder
from tests.support.installed import install_entry_point

NAMES = ("", "french", "german")
LLAMA = next(family for family in FAMILIES if family.model_type == "llama")
COUNT = 16
PROMPTS = [[5, 9, 90, 31, 7], [17], list(range(3, 60))]
EVERY_PAIR = [token for second in range(320) for token in (9, second)] + [9]  # whatever follows, it has followed before


def vectors(layer: int) -> Tensor:
    """Return the vector that layer `layer` adds for each adapter, [3, 64]; zeros without one."""
    table = torch.randn(3, 64, generator=torch.Generator().manual_seed(layer)) * 0.7
    return table.index_fill(0, torch.tensor([0]), 0.0)


class AdaptedLayer(nn.Module):
    """A decoder layer that adds its row's vector. It is given the rows once, when it is made."""

    def __init__(self, inner: DecoderLayer, table: Tensor, rows: AdapterRows):
        super().__init__()
        self.inner, self.rows = inner, rows
        self.register_buffer("table", table)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        return self.inner(hidden, context) + self.table.index_select(0, self.rows.of_tokens(len(hidden)))

    def slots(self, prefix: str) -> dict[str, Any]:
        return self.inner.slots(prefix)


class AdaptedModel(Decoder):
    """A Llama with two adapters."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.adapters = AdapterRows(NAMES[1:])
        for index in range(len(self.layers)):
            self.layers[index] = AdaptedLayer(self.layers[index], vectors(index).to(self.device), self.adapters)

    def make_layer(self, config: ModelConfig, index: int, prefix: str, options: LayerOptions) -> nn.Module:
        return DecoderLayer(config, index, prefix, options)


ENTRY = Entry(replace(LLAMA, architecture="AdaptedForCausalLM", model_type="adapted"), model=AdaptedModel)


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, whose config.json names the toy architecture."""
    folder = tiny_folder("llama", tmp_path_factory.mktemp("adapted"), tiny_model)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["AdaptedForCausalLM"]}))
    return folder


@pytest.fixture(params=DEVICES)
def make(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    install_entry_point(monkeypatch, tmp_path, "adapted", "tests.engine.core.test_adapters:ENTRY")
    with engines(model=str(folder), device=request.param, dtype="float32", page_size=4) as make:
        yield make


class AdaptedReference:
    """Greedy tokens of the model in transformers, whose layers add the vectors of an adapter."""

    def __init__(self, folder: Path):
        self.model = load_reference(folder)
        self._adapter = 0
        for index, layer in enumerate(self.model.model.layers):
            table = vectors(index)
            layer.register_forward_hook(lambda *call, table=table: call[-1] + table[self._adapter])
        self._found: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], adapter: str, count: int = COUNT) -> list[int]:
        key = adapter, tuple(prompt)
        if key not in self._found:
            self._adapter = NAMES.index(adapter)
            text = list(prompt)
            for _ in range(count):
                text.append(int(self.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
            self._found[key] = text[len(prompt) :]
        return self._found[key]


@pytest.fixture(scope="module")
def reference(folder: Path) -> AdaptedReference:
    return AdaptedReference(folder)


def run(loop: EngineLoop, asked: Sequence[tuple[Sequence[int], str]], count: int = COUNT) -> list[list[int]]:
    """Return the tokens of (prompt, adapter) pairs, in one batch."""
    for number, (prompt, adapter) in enumerate(asked):
        loop.add(
            EngineRequest(request_id=str(number), prompt_token_ids=list(prompt), params=greedy(count), adapter=adapter)
        )
    events = drain(loop)
    return [tokens(events[str(number)]) for number in range(len(asked))]


MIXED = [(prompt, NAMES[(place + shift) % 3]) for shift in range(2) for place, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
def test_each_row_of_a_batch_has_its_adapter(make, reference, scope):
    engine = make(inference_cuda_graph_scope=scope, graph_buckets=(4, 8))  # six rows and two of padding
    expected = [reference.greedy(*one) for one in MIXED]
    assert run(engine.loop, MIXED) == expected
    again = [(prompt, NAMES[NAMES.index(adapter) - 1]) for prompt, adapter in MIXED]  # the slots' adapters change
    assert run(engine.loop, again) == [reference.greedy(*one) for one in again]
    graphs = engine.stats().graphs
    assert (scope == "none") != any(labels[2] == "decode" for labels in dict(graphs["replays"]))
    assert not any(reason == "capture_failed" for (_, _, reason), _ in graphs["fallbacks"])


def test_the_adapter_is_part_of_a_cached_prefix(make, reference):
    engine = make(enable_prefix_caching=True)
    text = PROMPTS[2]
    for adapter in NAMES:  # a page of another adapter would change the tokens
        assert run(engine.loop, [(text, adapter)]) == [reference.greedy(text, adapter)]
    assert engine.stats().prefix_cache_hits == 0
    assert run(engine.loop, [(text, "german")]) == [reference.greedy(text, "german")]
    assert engine.stats().prefix_cache_hits > 0


def test_chunks_and_preemptions_keep_the_adapter(make, reference):
    engine = make(max_num_batched_tokens=8, max_model_len=96, num_pages=26)
    asked = [([10 + place, 20 + place, 30 + place], NAMES[place % 3]) for place in range(8)] + MIXED[2:3]
    assert run(engine.loop, asked) == [reference.greedy(*one) for one in asked]
    assert engine.stats().num_preemptions > 0


def test_rows_with_drafts_have_their_adapter(make, reference):
    engine = make(num_speculative_tokens=2, max_model_len=1024, max_num_batched_tokens=128, num_pages=700)
    asked = [(EVERY_PAIR, name) for name in NAMES]
    assert run(engine.loop, asked, 4) == [reference.greedy(*one, 4) for one in asked]
    assert engine.stats().draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", ["cpu"], indirect=True)
def test_two_ranks_have_the_same_adapters(make, reference):
    engine = make(tensor_parallel_size=2)
    assert run(engine.loop, MIXED[:3]) == [reference.greedy(*one) for one in MIXED[:3]]


def test_an_adapter_that_is_not_loaded_is_refused_by_its_name(make, tiny_model):
    request = EngineRequest(request_id="a", prompt_token_ids=[1], params=greedy(4), adapter="latin")
    with pytest.raises(RequestError, match="adapter='latin' is not loaded: loaded are french, german") as caught:
        make().loop.add(request)
    assert caught.value.param == "adapter"
    with pytest.raises(RequestError, match="adapter='latin' is not loaded: this model has no adapters; leave it out"):
        make(model=str(tiny_model)).loop.add(request)


async def test_a_client_sends_the_name(folder, reference, tmp_path, monkeypatch):
    install_entry_point(monkeypatch, tmp_path, "adapted", "tests.engine.core.test_adapters:ENTRY")
    settings = SETTINGS | {"model": str(folder), "device": "cpu", "dtype": "float32"}
    client = make_client(EngineConfig(**settings), in_process=True)
    await client.start()
    try:
        found: list[int] = []
        async for deltas in client.stream("a", prompt_token_ids=PROMPTS[0], params=greedy(COUNT), adapter="german"):
            found += [token for delta in deltas for token in delta.token_ids]
        assert found == reference.greedy(PROMPTS[0], "german")
    finally:
        await client.close()


def test_fused_kernels_are_refused(make, folder):
    engine = make()
    with pytest.raises(ModelError, match="adapters"):
        engine.loop.executor.worker.runner.model.fused(1, 1)


def test_names_are_different_and_not_empty():
    for names in (["a", "a"], [""]):
        with pytest.raises(ModelError, match="need different names"):
            AdapterRows(names)
