"""Every family on a GPU: its steps there, fused or not, are as near to float32 as its own layers in bfloat16."""

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from tests.support.families import FAMILIES, WINDOW, tiny_folder

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
PROMPTS = [[5 + (7 * place + shift) % 300 for place in range(6 * WINDOW + shift)] for shift in range(5)]
COUNT = 12
EXACT = 1e-3  # mean difference of log-probabilities in float32 on a GPU from those on a CPU, which equal transformers'
RATIO, SLACK = 1.5, 0.01  # of the mean difference from float32, of fused steps beside the model's own layers

pytestmark = pytest.mark.gpu


def scores(folder, device: str, dtype: str, kernels: str = "auto") -> tuple[list[torch.Tensor], list[list[int]]]:
    """Return the log-probabilities of the prompts' tokens and of greedy tokens, one tensor per prompt, and these."""
    config = EngineConfig(
        model=str(folder), device=device, dtype=dtype, kernels=kernels, warmup="lazy", max_num_seqs=8,
        max_model_len=256, max_num_batched_tokens=128, num_pages=600,
    )  # fmt: skip
    with Engine(config) as engine:
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    assert all(output.finish_reason == "length" for output in outputs), outputs[0].outputs[0].error
    found = [
        torch.tensor([entry.logprob for entry in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)])
        for output in outputs
    ]
    return found, [output.token_ids for output in outputs]


def difference(one, other) -> torch.Tensor:
    """Return the differences of log-probabilities, of each prompt up to the first other token."""
    parts = []
    for first, second, mine, yours in zip(one[0], other[0], one[1], other[1], strict=True):
        same = next((place for place, (a, b) in enumerate(zip(mine, yours, strict=True)) if a != b), COUNT)
        count = len(first) - COUNT + same
        parts.append((first[:count] - second[:count]).abs())
    return torch.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_steps_of_a_gpu_are_as_near_to_float32_as_the_models_own_layers(family, tiny_model, tmp_path):
    folder = tiny_folder(family, tmp_path, tiny_model, **SIZES)
    truth = scores(folder, "cpu", "float32")
    assert difference(scores(folder, "cuda", "float32"), truth).mean() < EXACT
    own = difference(scores(folder, "cuda", "bfloat16", "torch"), truth).mean()
    assert difference(scores(folder, "cuda", "bfloat16"), truth).mean() < RATIO * own + SLACK
