"""An engine with fused kernels: replay equals eager, layer graphs equal block graphs, and logprobs are right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: torch.cuda.is_available() is False", allow_module_level=True)

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ConfigError
from tests.engine.lively import Reference, write_lively_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # from Triton: Python's ast, numpy scalars
]
SETTINGS = {"device": "cuda", "max_num_seqs": 12, "max_model_len": 1024, "num_pages": 400,
            "max_num_batched_tokens": 300, "graph_manifest": "none", "warmup": "full"}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lively")
    write_lively_model(tiny_model, folder, seed=0)
    return str(folder)


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    shared = [rng.randrange(3, 200) for _ in range(70)]
    lengths = [1, 2, 15, 16, 17, 64, 130, 280, 350, 700]
    return [[rng.randrange(3, 200) for _ in range(length)] for length in lengths] + [
        shared + [rng.randrange(3, 200) for _ in range(extra)] for extra in (1, 30, 90)
    ]


def answers(model: str, **options) -> tuple[list[list[int]], dict]:
    with Engine(EngineConfig(model=model, **(SETTINGS | {"dtype": "bfloat16"} | options))) as engine:
        outputs = engine.generate(prompt_token_ids=prompts(), sampling_params=GREEDY)
        engine.idle_check()
        return [output.token_ids for output in outputs], engine.stats().graphs


def test_gpu_replay_of_fused_kernels_gives_the_same_tokens_as_eager(model):
    replayed, graphs = answers(model)
    assert not dict(graphs["fallbacks"])
    assert {labels[2] for labels, _ in graphs["replays"]} == {"decode", "prefill"}
    assert answers(model, cuda_graph_impl="none")[0] == replayed
    assert answers(model, inference_cuda_graph_scope="layer")[0] == replayed
    assert answers(model, warmup="lazy")[0] == replayed


def test_gpu_fused_log_probabilities_match_float32(model):
    wanted = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    found = {}
    for dtype, kernels in (("bfloat16", "fused"), ("bfloat16", "torch"), ("float32", "auto")):
        with Engine(EngineConfig(model=model, **(SETTINGS | {"dtype": dtype, "kernels": kernels}))) as engine:
            outputs = engine.generate(prompt_token_ids=prompts()[2:], sampling_params=wanted)
            found[dtype, kernels] = torch.tensor(
                [entry.logprob for output in outputs for entry in output.prompt_logprobs[1:]]
            )
    exact = found["float32", "auto"]
    fused, plain = ((found["bfloat16", kernels] - exact).abs().mean() for kernels in ("fused", "torch"))
    assert fused < 1.5 * plain + 1e-3 and fused < 0.05


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_gpu_log_probabilities_of_kernels_equal_those_of_torch(model, mode):
    """Torch computes those of requests with more than 20 alternatives; the first five must be the same."""
    settings = SETTINGS | {"dtype": "bfloat16", "logprobs_mode": mode, "enable_prefix_caching": False}

    def scored(engine: Engine, counts: list[int | None]) -> list[tuple[list[int], list | None]]:
        params = [
            SamplingParams(temperature=index % 3 * 0.4, logprobs=counts[index % len(counts)], max_tokens=24,
                           ignore_eos=True, seed=index, logprob_token_ids=[7, 9] if index % 4 == 1 else [])
            for index in range(len(prompts()))
        ]  # fmt: skip
        return [(one.token_ids, one.logprobs) for one in engine.generate(prompt_token_ids=prompts(),
                                                                        sampling_params=params)]  # fmt: skip

    with Engine(EngineConfig(model=model, **settings)) as engine:
        kernels, torch_only, mixed = (scored(engine, counts) for counts in ([5], [40], [5, 40, 0]))
        graphs = engine.stats().graphs
    with Engine(EngineConfig(model=model, **(settings | {"cuda_graph_impl": "none"}))) as engine:
        assert scored(engine, [5]) == kernels
    assert not dict(graphs["fallbacks"])
    assert any(labels[0] == "logprobs" for labels, _ in graphs["replays"])
    for found, wanted, other in zip(kernels, torch_only, mixed, strict=True):
        assert found[0] == wanted[0] == other[0]
        for one, two, three in zip(found[1], wanted[1], other[1], strict=True):
            assert (one.token_id, one.rank) == (two.token_id, two.rank) == (three.token_id, three.rank)
            assert list(one.top) == list(two.top)[:5] and len(one.top) == 5
            assert list(one.named) == list(two.named) == list(three.named)
            assert [one.logprob, *one.top.values(), *one.named.values()] == pytest.approx(
                [two.logprob, *list(two.top.values())[:5], *two.named.values()], abs=1e-5
            )
            assert three.logprob == pytest.approx(one.logprob, abs=1e-5)


def test_gpu_hidden_states_are_those_that_the_head_reads(model):
    """Of the first answer's tokens, which decode steps computed, and of a prompt of the same tokens."""
    wanted = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, return_hidden_states=True)
    found = {}
    for name, options in {
        "block": {}, "layer": {"inference_cuda_graph_scope": "layer"}, "eager": {"cuda_graph_impl": "none"},
        "torch": {"kernels": "torch"}, "float32": {"dtype": "float32"},
    }.items():  # fmt: skip
        settings = SETTINGS | {"dtype": "bfloat16", "enable_return_hidden_states": True} | options
        with Engine(EngineConfig(model=model, **settings)) as engine:
            decoded = engine.generate(prompt_token_ids=prompts()[2:8], sampling_params=wanted)
            again = engine.generate(
                prompt_token_ids=[[*one.prompt_token_ids, *one.token_ids][:-1] for one in decoded],
                sampling_params=SamplingParams(max_tokens=0, return_hidden_states=True),
            )
            found[name] = [one.hidden_states for one in decoded]
            for one, other in zip(decoded, again, strict=True):
                assert one.hidden_states.shape == other.hidden_states.shape
                error = abs(one.hidden_states - other.hidden_states).mean() / abs(other.hidden_states).mean()
                assert error < (1e-4 if name == "float32" else 0.05), name
    for name in ("layer", "eager"):
        assert all((one == other).all() for one, other in zip(found["block"], found[name], strict=True)), name
    for index, prompt in enumerate(prompts()[2:8]):
        exact = found["float32"][index][: len(prompt)]
        for name in ("block", "torch"):
            assert abs(found[name][index][: len(prompt)] - exact).mean() / abs(exact).mean() < 0.1, name


@pytest.mark.parametrize("options", [{}, {"kernels": "torch"}, {"dtype": "float32"}], ids=["fused", "torch", "float32"])
def test_gpu_vectors_beside_decodes_replay_the_graphs_of_prompts(model, options):
    reference = Reference(Path(model)).model.model
    pooled = {mode: SamplingParams(temperature=0.0, max_tokens=0, pooling=mode) for mode in ("last", "mean")}
    params = [params for _ in prompts() for params in (*pooled.values(), GREEDY)]
    with Engine(EngineConfig(model=model, **(SETTINGS | {"dtype": "bfloat16"} | options))) as engine:
        repeated = [prompt for prompt in prompts() for _ in range(3)]
        outputs = engine.generate(prompt_token_ids=repeated, sampling_params=params)
        engine.idle_check()
        assert dict(engine.stats().graphs["fallbacks"]) == {}
    for output, prompt, one in zip(outputs, repeated, params, strict=True):
        if one.pooling is None:
            assert len(output.token_ids) == 24
            continue
        with torch.inference_mode():
            hidden = reference(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        expected = (hidden[-1] if one.pooling == "last" else hidden.mean(0)).numpy()
        error = abs(output.hidden_states[0] - expected).mean() / abs(expected).mean()
        assert error < (1e-3 if "dtype" in options else 0.1), (len(prompt), one.pooling)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "kernels": "torch"}, {"dtype": "float32"}]
)
def test_gpu_any_number_of_short_prompts_replays_graphs(model, options):
    settings = SETTINGS | {"num_pages": 2000, "max_num_seqs": 600, "max_num_batched_tokens": 2048} | options
    with Engine(EngineConfig(model=model, **settings)) as engine:
        short = [[5, 6, 7 + index % 180] for index in range(500)]
        outputs = engine.generate(prompt_token_ids=short, sampling_params=GREEDY)
        fallbacks = dict(engine.stats().graphs["fallbacks"])
    assert all(len(output.token_ids) == 24 for output in outputs)
    assert fallbacks == {}


def test_gpu_more_rows_than_split_products_take_have_the_tokens_of_few(model):
    """Above 256 rows GEMMs run in cuBLAS: replay equals eager, and nearly all tokens equal those of a small batch."""
    rng = random.Random(2)
    many = [[rng.randrange(3, 200) for _ in range(rng.randrange(1, 24))] for _ in range(600)]
    wanted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def tokens(**options):
        settings = (
            SETTINGS
            | {
                "dtype": "bfloat16",
                "num_pages": 2000,
                "max_num_seqs": 640,
                "max_num_batched_tokens": 2048,
                "graph_buckets": (64, 256, 512, 640),
            }
            | options
        )
        with Engine(EngineConfig(model=model, **settings)) as engine:
            outputs = engine.generate(prompt_token_ids=many, sampling_params=wanted)
            replays = dict(engine.stats().graphs["replays"])
        return torch.tensor([output.token_ids for output in outputs]), replays

    replayed, replays = tokens()
    assert any(labels[2] == "decode" and labels[3] > 512 for labels in replays), replays
    assert torch.equal(tokens(cuda_graph_impl="none")[0], replayed)
    few = tokens(max_num_seqs=48, graph_buckets=(48,))[0]
    assert (few[:, 0] == replayed[:, 0]).float().mean() > 0.97


def test_gpu_fused_kernels_are_refused_for_float32(model):
    with pytest.raises(ConfigError, match="16-bit"):
        Engine(EngineConfig(model=model, **(SETTINGS | {"dtype": "float32", "kernels": "fused"})))
