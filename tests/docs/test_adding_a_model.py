"""The listings of docs/adding-a-model.md, installed as written and served, against plain PyTorch."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import Engine, EngineConfig, SamplingParams
from engine.attention.cache_spec import RecurrentStateSpec
from engine.attention.model_state import StepRows
from engine.attention.recurrent_states import RecurrentStates, StepStates
from engine.models.adapters import AdapterRows
from engine.models.interface import ForwardContext
from engine.models.registry import config_from_dict
from engine.protocol.slot_assignment import SlotAssignment
from tests.engine.lively import MANY, PROMPTS, SETTINGS, greedy
from tests.support.installed import install_entry_point

PAGE = Path(__file__).resolve().parents[2] / "docs/adding-a-model.md"
LAYERS, HEADS, KV_HEADS, HEAD_DIM, SCALE = 2, 4, 2, 16, 1.4
CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "depth_scale": SCALE,
    "dtype": "float32",
}


def listings(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the page's module and entry point as a package."""
    site, module = tmp_path / "site", listings("python")[0]
    [project] = map(tomllib.loads, listings("toml"))
    [(name, value)] = project["project"]["entry-points"]["encore.models"].items()
    install_entry_point(monkeypatch, site, name, value)
    file = module.splitlines()[0].removeprefix("# ")
    (site / file).write_text(module)
    yield
    sys.modules.pop(Path(file).stem, None)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Random weights under the names of the checkpoint, large enough that greedy text varies."""
    hidden, width, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    for index in range(LAYERS):
        shapes |= {
            f"model.layers.{index}.{name}": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (HEADS * HEAD_DIM, hidden),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, hidden),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, hidden),
                "self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
                "mlp.up_proj": (width, hidden),
                "mlp.down_proj": (hidden, width),
            }.items()
        }
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


@pytest.fixture
def make(family: None, tmp_path: Path, weights: dict[str, torch.Tensor]) -> Iterator[Callable[..., Engine]]:
    """Make engines on the toy model; each is checked for leaks and closed after the test."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, str(folder / "model.safetensors"))
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(Engine(EngineConfig(**(SETTINGS | {"model": str(folder), "device": "cpu"} | settings))))
        return made[-1]

    yield make
    for engine in made:
        engine.idle_check()
        engine.close()


def plain_logits(weights: dict[str, torch.Tensor], ids: Sequence[int]) -> torch.Tensor:
    """The model over a whole sequence: logits [len(ids), vocab]."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[f"{name}.weight"]

    length = len(ids)
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2).unsqueeze(1)

    def rope(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    hidden = weights["model.embed_tokens.weight"][torch.tensor(list(ids))]
    for index in range(LAYERS):
        name = f"model.layers.{index}"
        project = lambda x, part, name=name: x @ weights[f"{name}.{part}.weight"].T  # noqa: E731
        x = norm(hidden, f"{name}.input_layernorm")
        q, k, v = (project(x, f"self_attn.{one}_proj").view(length, -1, HEAD_DIM) for one in "qkv")
        q, k, v = rope(q), *(one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (rope(k), v))
        scores = (torch.einsum("lhd,shd->hls", q, k) * HEAD_DIM**-0.5).masked_fill(later, float("-inf"))
        attended = torch.einsum("hls,shd->lhd", scores.softmax(-1), v).flatten(1)
        mlp = project(project(x, "mlp.up_proj").relu().square(), "mlp.down_proj")
        hidden = hidden + SCALE ** (index + 1) * (project(attended, "self_attn.o_proj") + mlp)
    return norm(hidden, "model.norm") @ weights["lm_head.weight"].T


@pytest.fixture
def expected(weights: dict[str, torch.Tensor]) -> Callable[..., list[list[int]]]:
    """Compute the greedy tokens of prompts in plain PyTorch."""

    def text(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        found = []
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(count):
                ids.append(int(plain_logits(weights, ids)[-1].argmax()))
            found.append(ids[len(prompt) :])
        return found

    return text


def tokens_of(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=greedy(count))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
def test_every_scope_gives_the_text_of_plain_torch(make, expected, scope):
    engine = make(inference_cuda_graph_scope=scope)
    found = tokens_of(engine, PROMPTS, 16)
    assert found == expected(PROMPTS, 16)
    assert all(len(set(one)) > 4 for one in found), "the text repeats itself: the weights are too small to prove much"
    graphs = engine.stats().graphs
    assert bool(dict(graphs["replays"])) == (scope != "none")
    assert not any(reason == "capture_failed" for (_, _, reason), _ in graphs["fallbacks"])


@pytest.mark.parametrize("batched", [8, 512])
def test_logits_equal_plain_torch(make, weights, batched):
    engine = make(max_num_batched_tokens=batched)
    params = greedy(8, logprobs=0, prompt_logprobs=0)
    outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = [*prompt, *output.token_ids]
        scored = [*(output.prompt_logprobs or [None])[1:], *(output.logprobs or [])]
        found = torch.tensor([one.logprob for one in scored])
        wanted = plain_logits(weights, ids).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_chunked_prefill_gives_the_same_text(make, expected):
    assert tokens_of(make(max_num_batched_tokens=8), PROMPTS, 12) == expected(PROMPTS, 12)


def test_preempted_requests_give_the_same_text(make, expected):
    engine = make(num_pages=20, max_model_len=128)
    assert tokens_of(engine, MANY, 60) == expected(MANY, 60)
    assert engine.stats().num_preemptions > 0


def test_a_cached_prefix_gives_the_same_text(make, expected):
    engine = make()
    shared = [5 + 7 * place % 300 for place in range(48)]
    for prompt in ([*shared, 9], [*shared, 200, 31]):
        assert tokens_of(engine, [prompt], 12) == expected([prompt], 12)
    assert engine.stats().prefix_cache_hits > 0


def test_an_update_serves_without_a_new_capture(make, weights, expected):
    engine = make(warmup="full")
    captures = dict(engine.stats().graphs["captures"])
    before = tokens_of(engine, PROMPTS, 8)
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = -weights[name]
    engine.update_weights([(name, weights[name])], version="other")
    assert tokens_of(engine, PROMPTS, 8) == expected(PROMPTS, 8) != before
    assert dict(engine.stats().graphs["captures"]) == captures


def test_two_tensor_parallel_ranks_give_the_same_text(make, expected):
    assert tokens_of(make(tensor_parallel_size=2), PROMPTS, 12) == expected(PROMPTS, 12)


def test_the_family_is_found_by_its_model_type_too(family):
    config = config_from_dict({name: value for name, value in CONFIG.items() if name != "architectures"})
    assert (config.architecture, config.depth_scale) == ("ToyForCausalLM", SCALE)


def test_the_recurrence_of_the_page_carries_its_state():
    listing: dict[str, Any] = {}
    exec(compile(listings("python")[1], str(PAGE), "exec"), listing)
    torch.manual_seed(0)
    states = RecurrentStates([RecurrentStateSpec(shapes=((3,),))], 4, torch.float64, "cpu")
    sequences = {2: torch.randn(2, 9, 3, dtype=torch.float64), 4: torch.randn(2, 6, 3, dtype=torch.float64)}
    done, outs = dict.fromkeys(sequences, 0), {entry: [] for entry in sequences}

    def step(lengths: dict[int, int], is_decode: bool) -> None:
        parts = [sequences[entry][:, done[entry] : done[entry] + length] for entry, length in lengths.items()]
        decay, inputs = torch.cat(parts, dim=1)
        entries, ends = torch.tensor(list(lengths)), torch.tensor(list(lengths.values())).cumsum(0)
        chunk_of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(list(lengths.values())))
        own = StepStates(states, entries) if is_decode else StepStates(states, entries, ends, chunk_of)
        h = listing["gated_recurrence"](0, decay, inputs, ForwardContext((), pytest.fail, None, own))
        for (entry, length), part in zip(lengths.items(), h.split(list(lengths.values())), strict=True):
            outs[entry].append(part)
            done[entry] += length

    step({4: 3}, False)
    step({2: 5, 4: 1}, False)
    step({4: 1, 2: 1}, True)
    step({2: 3, 4: 1}, False)
    for entry, (decay, inputs) in sequences.items():
        h = torch.zeros(3, dtype=torch.float64)
        for token, found in enumerate(torch.cat(outs[entry])):
            h = decay[token] * h + inputs[token]
            torch.testing.assert_close(found, h)


def test_the_layer_of_the_page_adds_the_vector_of_each_rows_adapter():
    listing: dict[str, Any] = {}
    exec(compile(listings("python")[2], str(PAGE), "exec"), listing)
    rows, vectors = AdapterRows(["one", "two"]), torch.tensor([[0.0], [1.0], [2.0]])
    layer = listing["AdapterBias"](vectors, rows)
    rows.allocate(4, 8, torch.device("cpu"))
    params = SamplingParams()
    rows.assign([SlotAssignment(3, params, 0, [1], [], "two"), SlotAssignment(0, params, 0, [1], [], "one")])
    rows.begin(StepRows(torch.tensor([4, 2, 1, 0])))  # a decode step, with a row of padding
    assert layer(torch.zeros(4, 1)).flatten().tolist() == [2, 0, 1, 0]
    chunks = torch.tensor([0, 0, 1, 2, 2, -1])  # of a packed step, and a token of padding
    rows.begin(StepRows(torch.tensor([1, 2, 4]), torch.tensor([2, 3, 5]), chunks))
    assert layer(torch.zeros(6, 1)).flatten().tolist() == [1, 1, 0, 2, 2, 0]
    rows.assign([SlotAssignment(3, params, 0, [1], [])])
    rows.begin(StepRows(torch.tensor([4, 1])))
    assert layer(torch.zeros(2, 1)).flatten().tolist() == [0, 1]
