"""Every family on a GPU: the steps that it runs there, fused or not, give the log-probabilities of its own layers."""

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ModelError
from tests.support.families import FAMILIES, WINDOW, tiny_folder

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
PROMPTS = [[5 + (7 * place + shift) % 300 for place in range(6 * WINDOW + shift)] for shift in range(5)]
COUNT = 12
MEAN, LARGEST = 0.02, 0.25  # of the differences of log-probabilities in bfloat16

pytestmark = pytest.mark.gpu


def scores(folder, kernels: str) -> tuple[list[list[float]], list[list[int]], bool]:
    """Return the log-probabilities of prompts and greedy tokens, the tokens, and whether the steps are fused."""
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="bfloat16", kernels=kernels, warmup="lazy", max_num_seqs=8,
        max_model_len=256, max_num_batched_tokens=128, num_pages=600, gpu_memory_utilization=0.3,
    )  # fmt: skip
    with Engine(config) as engine:
        runner = engine.loop.executor.worker.runner
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=params)
        assert all(output.finish_reason == "length" for output in outputs), outputs[0].outputs[0].error
        found = [
            [entry.logprob for entry in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)]
            for output in outputs
        ]
        return found, [output.token_ids for output in outputs], runner.step_model is not runner.model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_steps_of_a_gpu_give_the_scores_of_the_models_own_layers(family, tiny_model, tmp_path, caplog):
    try:
        folder = tiny_folder(family, tmp_path, tiny_model, **SIZES)
    except (TypeError, ValueError, ModelError) as error:
        pytest.skip(f"transformers makes no {family} of these sizes: {error}")
    expected, tokens, _ = scores(folder, "torch")
    found, own, fused = scores(folder, "auto")
    print(f"{family}: {'fused' if fused else 'own layers'}")
    for one, other, first, second in zip(found, expected, own, tokens, strict=True):
        same = next((place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), COUNT)
        count = len(one) - COUNT + same
        differences = (torch.tensor(one[:count]) - torch.tensor(other[:count])).abs()
        assert differences.mean() < MEAN and differences.max() < LARGEST, (differences.mean(), differences.max())
