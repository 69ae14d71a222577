"""TRL's GRPOTrainer with rollouts of the embedded engine. Skipped where TRL 1.16 or newer is not installed."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import Engine, EngineConfig
from engine.integrations.trl import RolloutFunc
from engine.integrations.trl_async import RolloutWorker, WeightTransfer

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


def test_trls_asynchronous_batches_are_made_of_the_workers_samples(tiny_model: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo import async_grpo_trainer as trl_async
    config = EngineConfig(model=str(tiny_model), dtype="float32", max_num_seqs=8, max_model_len=128, num_threads=1,
                          graph_manifest="none", progress=False)  # fmt: skip
    args = SimpleNamespace(
        max_completion_length=5, temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
        num_generations=4, queue_maxsize=8,
    )  # fmt: skip
    with Engine(config) as engine:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        worker = RolloutWorker(engine, [{"prompt": "red bird"}, {"prompt": "old house"}], even, tokenizer, args)
        for protocol, ours in (
            (trl_async.RolloutWorkerProtocol, worker),
            (trl_async.WeightTransferProtocol, WeightTransfer(worker)),
        ):
            names = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
            assert {name for name in names if not hasattr(ours, name)} == set()
        metrics: dict[str, list[Any]] = defaultdict(list)
        samples = trl_async.RolloutQueueDataset(
            worker.rollout_buffer, lambda: worker.model_version, worker.check_health, 60.0, metrics
        )
        worker.start()
        rows = next(iter(trl_async.FixedCountBatcher(samples, num_processes=1, microbatch_size=8)))
        worker.stop()
        batch = trl_async.DataCollatorForRollout(pad_token_id=0, metrics=metrics)([rows])
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = []
    for one in rows[0].samples:
        ids = torch.from_numpy(one["input_ids"])[None]
        with torch.no_grad():
            found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        expected.append(found[torch.from_numpy(one["completion_mask"][1:]).bool()])
    assert torch.allclose(batch["old_log_probs"][0], torch.cat(expected), atol=1e-4)
    assert len(metrics["reward"]) == 1 and 0 <= metrics["reward"][0] <= 1
