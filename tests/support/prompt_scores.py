"""Compare the log-probabilities of generated tokens with those of the same tokens in a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.protocol.outputs import RequestOutput


def check_beside_float32(
    folder: str,
    settings: Mapping[str, Any],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    outputs: Sequence[RequestOutput],
) -> None:
    """Check the log-probabilities of outputs in 16 bits against the prompt's in a float32 engine of these settings."""
    whole = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with Engine(EngineConfig(model=folder, dtype="float32", **settings)) as engine:
        references = engine.generate(prompt_token_ids=whole, sampling_params=scored)
    for prompt, output, reference, one in zip(prompts, outputs, references, params, strict=True):
        assert len(output.token_ids) == one.max_tokens
        if one.temperature == 0:  # others have the log-probabilities at their temperature
            wanted = [entry.logprob for entry in reference.prompt_logprobs[len(prompt) :]]
            assert [entry.logprob for entry in output.logprobs] == pytest.approx(wanted, abs=0.08)
