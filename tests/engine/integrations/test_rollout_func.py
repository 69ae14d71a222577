"""RolloutFunc against a trainer that holds what it reads of TRL's GRPOTrainer; test_trl.py runs the real one."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import ConfigError, RequestError, WeightUpdateError
from engine.integrations.trl import RolloutFunc

PROMPTS = ["red bird", "red bird", "the old house", "moon"]


def make_trainer(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> SimpleNamespace:
    """Return what RolloutFunc reads of a GRPOTrainer."""
    args: dict[str, Any] = {
        "max_completion_length": 6, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "generation_kwargs": None, "chat_template_kwargs": None,
    }  # fmt: skip
    return SimpleNamespace(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        processing_class=AutoTokenizer.from_pretrained(folder),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(**args | settings),
        use_vllm=False,
    )


def largest_difference(trainer: SimpleNamespace, found: dict[str, Any]) -> float:
    """Return the largest difference between the rollouts' log-probabilities and those of the trainer's forward."""
    differences = []
    for prompt, completion, sampled in zip(*(found[name] for name in found), strict=True):
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
        expected = (logits / trainer.args.temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])
        differences.append((expected[:, 0] - torch.tensor(sampled)).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("weights", ["share", "copy"])
def test_rollouts_follow_the_trainers_weights(make_engine: Any, other_model: Path, weights: str) -> None:
    engine, trainer = make_engine(), make_trainer(other_model)
    rollouts = RolloutFunc(engine, weights=weights)
    for step in range(3):
        trainer.state.global_step = step
        found = rollouts(PROMPTS, trainer)
        assert list(found) == ["prompt_ids", "completion_ids", "logprobs"] and engine.weight_version == f"step-{step}"
        assert found["prompt_ids"] == trainer.processing_class(text=PROMPTS)["input_ids"]
        assert found["completion_ids"][0] != found["completion_ids"][1], "samples of one prompt differ"
        assert largest_difference(trainer, found) < 1e-4
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)


def test_weights_that_changed_within_a_step_are_used(make_engine: Any, lively_model: Path, other_model: Path) -> None:
    trainer, rollouts = make_trainer(lively_model), RolloutFunc(make_engine(), weights="copy")
    rollouts(PROMPTS, trainer)
    trainer.model = make_trainer(other_model).model  # as when a checkpoint is loaded
    assert largest_difference(trainer, rollouts(PROMPTS, trainer)) < 1e-4


def test_conversations_use_the_chat_template(make_engine: Any, lively_model: Path) -> None:
    trainer, rollouts = make_trainer(lively_model), RolloutFunc(make_engine())
    messages = [{"role": "user", "content": "red bird"}]
    rendered = trainer.processing_class.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    found = rollouts([messages], trainer)
    assert found["prompt_ids"] == [trainer.processing_class(rendered)["input_ids"]]


def test_what_trl_drops_is_said_once(make_engine: Any, lively_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, rollouts = make_trainer(lively_model, torch.bfloat16), RolloutFunc(make_engine(), weights="copy")
    with caplog.at_level(logging.WARNING):
        rollouts(PROMPTS, trainer)
        rollouts(PROMPTS, trainer)
    assert [one.message.count("(float32) is not the trainer's (bfloat16)") for one in caplog.records] == [1]


def test_a_truncated_distribution_is_warned_of(
    make_engine: Any, lively_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RolloutFunc(make_engine())(PROMPTS, make_trainer(lively_model, top_p=0.9))
    assert "ratios of the two are off" in caplog.text
    caplog.clear()
    raw = make_trainer(lively_model, top_p=0.9, temperature=1.0)
    found = RolloutFunc(make_engine(logprobs_mode="raw"))(PROMPTS, raw)
    assert "ratios" not in caplog.text and largest_difference(raw, found) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generation_kwargs": {"seed": 1}}, "generation_kwargs has 'seed'"),
        ({"generation_kwargs": {"n": 2}}, "generation_kwargs has 'n'"),
        ({"generation_kwargs": {"top_kk": 2}}, "top_kk"),
    ],
)
def test_sampling_that_would_be_wrong_is_refused(
    make_engine: Any, lively_model: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, RequestError), match=message):
        RolloutFunc(make_engine())(PROMPTS, make_trainer(lively_model, **change))


def test_raw_log_probabilities_are_refused_with_a_temperature(make_engine: Any, lively_model: Path) -> None:
    with pytest.raises(ConfigError, match="leaves out the temperature 0.7"):
        RolloutFunc(make_engine(logprobs_mode="raw"))(PROMPTS, make_trainer(lively_model))


def test_trainers_that_the_engine_cannot_follow_are_refused(make_engine: Any, lively_model: Path) -> None:
    engine, trainer = make_engine(), make_trainer(lively_model)
    with pytest.raises(ConfigError, match="weights='both' is not one of share, copy"):
        RolloutFunc(engine, weights="both")
    trainer.tools = [print]
    with pytest.raises(ConfigError, match="^tools: "):
        RolloutFunc(engine)(PROMPTS, trainer)
    trainer.tools, trainer.model.peft_config = [], {}
    with pytest.raises(ConfigError, match="PEFT"):
        RolloutFunc(engine)(PROMPTS, trainer)
    del trainer.model.peft_config
    next(trainer.model.parameters()).ds_id = 0
    with pytest.raises(ConfigError, match="sharded"):
        RolloutFunc(engine)(PROMPTS, trainer)
    image = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(ConfigError, match="parts other than text: .'image'"):
        RolloutFunc(engine)([image], make_trainer(lively_model))
    with pytest.raises(WeightUpdateError, match="dtype torch.bfloat16 in the trainer"):
        RolloutFunc(engine)(PROMPTS, make_trainer(lively_model, torch.bfloat16))
