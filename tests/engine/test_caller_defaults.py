"""An embedded engine computes the same under any default device and dtype of its caller, as trainers set them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine import SamplingParams

PROMPTS = [[1, 2, 3, 4], [7, 8, 9]]
SAMPLED = SamplingParams(
    max_tokens=8, temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=3, logit_bias={5: 1.5}, frequency_penalty=0.3,
    repetition_penalty=1.1, logprobs=1, prompt_logprobs=1,
)  # fmt: skip


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = {
    "device": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


def found(make_engine) -> list:
    """Build an engine and return tokens, log-probabilities and a vector."""
    engine = make_engine()
    greedy = engine.generate(prompt_token_ids=PROMPTS, sampling_params=SamplingParams(max_tokens=6, temperature=0.0))
    sampled = engine.generate(prompt_token_ids=PROMPTS, sampling_params=SAMPLED)
    tokens = [output.token_ids for output in (*greedy, *sampled)]
    logprobs = [entry.logprob for output in sampled for entry in output.outputs[0].logprobs]
    return [tokens, logprobs, engine.embed(prompt_token_ids=PROMPTS)[0].tolist()]


@pytest.mark.parametrize("default", DEFAULTS)
def test_outputs_do_not_depend_on_the_callers_defaults(make_engine, default):
    expected = found(make_engine)
    with DEFAULTS[default]():
        assert found(make_engine) == expected
