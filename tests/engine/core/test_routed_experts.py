"""Routed experts of requests that ask for them: the choices of transformers' routers, in graphs and eager."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.core.loop import EngineLoop
from engine.errors import ConfigError, RequestError
from tests.engine.core.test_loop import SMALL
from tests.engine.lively import MANY, PROMPTS, SETTINGS, drain, greedy, request, tokens
from tests.support.families import load_reference, tiny_folder

ON = {"enable_return_routed_experts": True, "cpu_weight_format": "fp32"}
WANTED = {"return_routed_experts": True}


class Routers:
    """The experts that transformers' routers choose, read where it hands them to its experts."""

    def __init__(self, folder):
        self.model = load_reference(folder)
        self._seen: list[torch.Tensor] = []
        for layer in self.model.model.layers:
            experts = getattr(layer.mlp, "experts", None)
            if experts is not None:
                experts.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module, args, kwargs) -> None:
        [chosen] = [one for one in (*args, *kwargs.values()) if torch.is_tensor(one) and one.dtype == torch.int64]
        self._seen.append(chosen)

    @torch.inference_mode()
    def __call__(self, ids) -> np.ndarray:
        """Return [len(ids), layers, k], the experts of a token in ascending order."""
        self._seen.clear()
        self.model(torch.tensor([list(ids)]), use_cache=False)
        return torch.stack(self._seen, dim=1).sort(dim=-1).values.numpy()


def assert_equal(found, ids, routers):
    expected = routers(ids)
    assert found.dtype == np.int16 and found.shape == expected.shape
    np.testing.assert_array_equal(np.sort(found, axis=-1), expected)


def computed(output, choice=None):
    choice = choice or output.outputs[0]
    return [*output.prompt_token_ids, *choice.token_ids][: -1 if choice.token_ids else None]


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    return tiny_folder("qwen3_moe", tmp_path_factory.mktemp("moe") / "model", tiny_model, initializer_range=0.2)


@pytest.fixture(scope="module")
def routers(folder):
    return Routers(folder)


@pytest.fixture
def make_moe(folder):
    made = []

    def make(**settings) -> Engine:
        made.append(Engine(EngineConfig(**({"model": str(folder)} | SETTINGS | ON | settings))))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
@pytest.mark.parametrize("behind", [False, True], ids=["sync", "async"])
def test_experts_equal_transformers(make_moe, routers, scope, behind):
    engine = make_moe(inference_cuda_graph_scope=scope, async_scheduling=behind)
    params = [greedy(count, return_routed_experts=index != 2) for index, count in enumerate((12, 1, 5, 30, 7))]
    outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    assert outputs[2].routed_experts is None
    for output in (*outputs[:2], *outputs[3:]):
        assert output.routed_experts.shape[1:] == (3, 3)  # layer 1 of 4 is dense
        assert_equal(output.routed_experts, computed(output), routers)
    replays = sum(count for _, count in engine.stats().graphs["replays"])
    assert (replays > 0) == (scope != "none")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "glm4_moe", "olmoe", "qwen2_moe"])
def test_each_kind_of_router_is_recorded(make_moe, tiny_model, tmp_path, family):
    place = tiny_folder(family, tmp_path / "model", tiny_model, initializer_range=0.2)
    engine = make_moe(model=str(place))
    for output in engine.generate(prompt_token_ids=PROMPTS[:3], sampling_params=greedy(8, **WANTED)):
        assert_equal(output.routed_experts, computed(output), Routers(place))


def test_chunks_and_cached_prefixes_leave_no_token_out(make_moe, routers):
    engine = make_moe(max_num_batched_tokens=16)
    prompt = list(range(3, 80))
    engine.generate(prompt_token_ids=[prompt], sampling_params=greedy(2))
    for _ in range(2):  # the prompt's pages are in the prefix cache
        [output] = engine.generate(prompt_token_ids=[prompt], sampling_params=greedy(6, **WANTED))
        assert_equal(output.routed_experts, computed(output), routers)


@pytest.mark.parametrize("behind", [False, True], ids=["sync", "async"])
def test_a_preempted_request_gives_the_experts_of_each_token_once(make_moe, routers, behind):
    loop: EngineLoop = make_moe(**SMALL, async_scheduling=behind).loop
    for index, prompt in enumerate(MANY):
        loop.add(request(str(index), prompt, greedy(30, **WANTED)))
    events = drain(loop)
    assert loop.stats().num_preemptions > 0
    for index, prompt in enumerate(MANY):
        parts = [event.routed_experts for event in events[str(index)] if event.routed_experts is not None]
        assert_equal(np.concatenate(parts), [*prompt, *tokens(events[str(index)])][:-1], routers)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "n": 3, "seed": 5},
        {"structured_outputs": {"regex": "[a-z ]{3,25}[.]"}, "temperature": 1.0},
        {"logprobs": 2, "prompt_logprobs": 1, "stop_token_ids": [7]},
        {"max_tokens": 0},
    ],
    ids=["n", "constrained", "logprobs", "prompt only"],
)
def test_experts_go_with_other_parameters(make_moe, routers, options):
    params = SamplingParams(**{"max_tokens": 12, **options, **WANTED})
    [output] = make_moe().generate(prompt_token_ids=[PROMPTS[0]], sampling_params=params)
    for choice in output.outputs:
        assert_equal(choice.routed_experts, computed(output, choice), routers)


def test_rows_with_experts_have_no_drafts(make_moe, routers):
    engine = make_moe(num_speculative_tokens=3)
    prompt = [5, 9, 200, 5, 9, 200, 5, 9]
    outputs = engine.generate(prompt_token_ids=[prompt, prompt], sampling_params=[greedy(20, **WANTED), greedy(20)])
    assert outputs[0].token_ids == outputs[1].token_ids
    assert_equal(outputs[0].routed_experts, computed(outputs[0]), routers)


def test_replays_that_are_compared_with_eager_agree(make_moe, routers):
    engine = make_moe(graph_shadow_check_share=0.5)
    [output] = engine.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=greedy(30, **WANTED))
    assert_equal(output.routed_experts, computed(output), routers)
    [((site, _, outcome), count)] = engine.stats().graphs["shadow_checks"]
    assert (site, outcome) == ("decode", "equal") and count > 1


def test_an_engine_that_records_none_refuses_the_request(make_moe):
    with pytest.raises(RequestError, match="doesn't record the experts of tokens; start it with") as refused:
        make_moe(enable_return_routed_experts=False).generate(
            prompt_token_ids=[PROMPTS[0]], sampling_params=greedy(8, **WANTED)
        )
    assert refused.value.param == "return_routed_experts"


def test_a_model_without_experts_is_refused_at_the_start(make_engine):
    with pytest.raises(ConfigError, match="enable_return_routed_experts: LlamaForCausalLM has no layer with experts"):
        make_engine(enable_return_routed_experts=True)


def test_pooling_excludes_it():
    with pytest.raises(RequestError, match="exclude each other"):
        SamplingParams(max_tokens=0, pooling="last", return_routed_experts=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_the_kernels_of_a_gpu_record_the_experts_of_transformers(make_moe, tiny_model, tmp_path, kernels):
    shapes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    place = tiny_folder("qwen3_moe", tmp_path / "model", tiny_model, initializer_range=0.1, **shapes)
    engine = make_moe(
        model=str(place), device="cuda", dtype="bfloat16", kernels=kernels, num_pages=64, cpu_weight_format="auto"
    )
    outputs = engine.generate(prompt_token_ids=list(PROMPTS), sampling_params=greedy(24, **WANTED))
    assert sum(count for _, count in engine.stats().graphs["replays"]) > 0
    routers, equal, total = Routers(place), 0, 0
    for output in outputs:
        found, expected = np.sort(output.routed_experts, axis=-1), routers(computed(output))
        assert found.dtype == np.int16 and found.shape == expected.shape
        equal, total = equal + int((found == expected).all(-1).sum()), total + expected[..., 0].size
    assert equal / total > 0.9, "in bfloat16 some routers round to another expert; those of other tokens agree in 2%"
