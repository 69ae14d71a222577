"""TRL's GRPOTrainer with rollouts of the embedded engine. Skipped where TRL 1.16 or newer is not installed."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import Engine, EngineConfig
from engine.integrations.trl import RolloutFunc

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")
GENERATIONS = 8


class Recorder(RolloutFunc):
    """Compares each rollout's log-probabilities with the trainer's forward on the same weights."""

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        fields = (output[name] for name in ("prompt_ids", "completion_ids", "logprobs"))
        for prompt, completion, sampled in zip(*fields, strict=True):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
            logits /= trainer.temperature
            found = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            self.differences.append((found - torch.tensor(sampled)).abs().max().item())
        return output

    differences: list[float]


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@pytest.mark.parametrize(
    ("weights", "is_chat", "steps"), [("share", False, 24), ("copy", True, 3)], ids=["shared text", "copied chat"]
)
def test_trl_trains_on_the_engines_rollouts(
    tiny_model: Path, tmp_path: Path, weights: str, is_chat: bool, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        text = ["red bird", "old house", "the moon", "a fire"]
        prompts = [[{"role": "user", "content": one}] for one in text] if is_chat else text
        args = GRPOConfig(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=32, num_generations=GENERATIONS,
            max_completion_length=8, learning_rate=1e-2, temperature=0.9, use_cpu=True, report_to="none",
            logging_steps=1, save_strategy="no", bf16=False, lr_scheduler_type="constant", disable_tqdm=True,
        )  # fmt: skip
        config = EngineConfig(
            model=str(tiny_model), dtype="float32", warmup="full", max_num_seqs=32, max_model_len=128, num_threads=1,
            graph_manifest="none", progress=False,
        )  # fmt: skip
        with Engine(config) as engine:
            before = engine.stats().graphs["captures"]
            rollouts = Recorder(engine, weights=weights)
            rollouts.differences = []
            trainer = GRPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
                processing_class=AutoTokenizer.from_pretrained(tiny_model), args=args, reward_funcs=even,
                train_dataset=Dataset.from_dict({"prompt": prompts}), rollout_func=rollouts,
            )  # fmt: skip
            with caplog.at_level(logging.WARNING, "engine.integrations.trl"):
                trainer.train()
            after, version = engine.stats().graphs, engine.weight_version
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"{weights} chat={is_chat}: rewards {rewards}, |difference| {max(rollouts.differences):.1e}")
    assert len(rewards) == steps
    if steps > 10:
        assert sum(rewards[-5:]) > 1.2 * sum(rewards[:5])
    assert max(rollouts.differences) < 1e-4
    assert after["captures"] == before and after["invalidations"] == [] and version == f"step-{steps - 1}"
    assert len([one for one in caplog.records if "importance correction" in one.message]) == 1
